"""Records of steps."""

import json
import math
import pathlib
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from mpar import Mesh, adapters, compile_step, models, tree
from mpar.adapters import LoRA
from mpar.optim import AdamW
from mpar.quantised import quantise
from mpar.tasks import Dpo, TaskChain
from mpar.train import (
    ExpertLoad,
    MetricsFile,
    StepRecord,
    expert_load,
    flops_per_token,
    read_metrics,
    side_losses,
    tensorboard_writer,
)
from mpar.train.curve import draw_experts, draw_numbers

BALLAST = """
import subprocess, sys
ballast = b"x" * 2**30
subprocess.run([sys.executable, "-c", sys.argv[1]], check=True)
"""
PEAK = "import torch; from mpar.train._metrics import peak_memory_bytes; print(peak_memory_bytes(torch.device('cpu')))"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("tied", [False, True])
def test_flops_per_token(tied):
    """Six FLOPs for each weight in a matrix product, head included and padding not, and twelve for each pair in attention."""
    model = models.from_config(CONFIG | {"tie_word_embeddings": tied})
    attention_weights = 8 * (4 * 6) + 2 * 8 * (2 * 6) + (4 * 6) * 8
    weights = 3 * (attention_weights + 3 * 8 * 20) + 50 * 8
    pairs = 3 * 4 * 6 * 32
    assert flops_per_token(model, 32, causal=False) == 6 * weights + 12 * pairs
    assert flops_per_token(model, 32, causal=True) == 6 * weights + 6 * pairs


def test_flops_per_token_without_a_gate():
    """Two matrices in a feed-forward layer without a gate; biases, those of heads too, are no matrices."""
    sizes = {key: value for key, value in CONFIG.items() if key != "model_type"}
    model = models.build("starcoder2", sizes)
    attention_weights = 8 * (4 * 6) + 2 * 8 * (2 * 6) + (4 * 6) * 8
    weights = 3 * (attention_weights + 2 * 8 * 20) + 50 * 8
    assert flops_per_token(model, 32, causal=True) == 6 * weights + 6 * 3 * 4 * 6 * 32


def test_flops_of_what_is_frozen():
    """A frozen weight has a forward and the gradient of what it is multiplied with; before the first that is trained, there is
    no gradient at all; a reference model has a forward only. Codes of quantised weights count as what they stand for."""
    plain = models.from_config(CONFIG | {"hidden_size": 64, "tie_word_embeddings": False})
    layer = 64 * (4 * 6) * 2 + 2 * 64 * (2 * 6) + 3 * 64 * 20
    weights, pairs = 3 * layer + 50 * 64, 2 * 4 * 6 * 32
    lora = adapters.add(plain, LoRA(rank=2, targets=("q_proj",)))
    of_lora = 3 * (64 + 4 * 6) * 2
    assert flops_per_token(lora, 32, causal=False) == 4 * weights + 6 * of_lora + 3 * 6 * pairs
    quantised = quantise(lora, "int8")
    assert flops_per_token(quantised, 32, causal=False) == flops_per_token(lora, 32, causal=False)
    assert flops_per_token(TaskChain(lora, Dpo(), plain, shared=True), 0, causal=False) == 6 * weights + 6 * of_lora
    upper = models.freeze(plain, names=["embed", "layers.[01]"])
    assert flops_per_token(upper, 32, causal=False) == 2 * weights + 4 * (layer + 50 * 64) + (2 + 2 + 6) * pairs
    count = sum(leaf.numel() for leaf in tree.leaves(plain.abstract_params))
    program = compile_step(quantised, AdamW(lr=1e-3), Mesh(tp=1), "ddp", (1, 32))
    assert program.num_parameters() == (of_lora, count)


def record(step: int) -> StepRecord:
    return StepRecord(step, 0.1 * step, 1.0, 1e-3, step, 1.0, 1.0, 1.0, 1.0, 1.0, 1, 1, 1)


def test_resuming_drops_what_will_be_done_again(tmp_path):
    """Records behind the step that a run resumes from go, and so does a half-written one; floats keep their bits."""
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    for step in range(1, 6):
        file.write(record(step))
    file.close()
    with path.open("a", encoding="utf-8") as other:
        other.write('{"step": 6, "loss"')
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3, 4, 5]
    resumed = MetricsFile(path, 3)
    resumed.write(record(4))
    resumed.close()
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [r["step"] for r in records] == [1, 2, 3, 4]
    assert records[2]["loss"] == 0.1 * 3


def test_what_is_not_finite_is_null(tmp_path):
    """The file is JSON also for a skipped step, whose loss is not finite; reading it gives NaN, which pictures leave out."""
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    for value in (math.nan, math.inf, -math.inf):
        file.write(replace(record(1), loss=value, skipped=1))
    file.close()
    for line in path.read_text(encoding="utf-8").splitlines():
        assert json.loads(line, parse_constant=pytest.fail)["loss"] is None
    assert all(math.isnan(r["loss"]) and r["skipped"] == 1 for r in read_metrics(path))


def test_a_file_that_cannot_be_shortened_stays(tmp_path, monkeypatch):
    """Later records are dropped all at once: if that fails, all are still there."""
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, 0)
    for step in (1, 2, 3):
        first.write(record(step))
    first.close()

    def full(self, *args, **how):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        MetricsFile(path, 2)
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3]


def test_a_record_is_on_the_disk_at_once(tmp_path):
    """Another process sees a record before the file is closed."""
    file = MetricsFile(tmp_path / "metrics.jsonl", 0)
    file.write(record(1))
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1
    file.close()


def test_tensorboard_is_optional(tmp_path, monkeypatch):
    """With the package there is an event file, without it there is no writer."""
    writer = tensorboard_writer(tmp_path / "events")
    assert writer is not None
    writer.add_scalar("loss", 1.0, 1)
    writer.close()
    assert list((tmp_path / "events").glob("events.*"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert tensorboard_writer(tmp_path / "none") is None


METRICS = {
    "loss": torch.tensor(2.0),
    "microbatch_losses": torch.tensor([2.0]),
    "weight": torch.tensor(16.0),
    "grad_norm": torch.tensor(1.0),
    "lr": torch.tensor(0.1),
    "aux_loss": torch.tensor(0.25),
    "layers.1.expert_counts": torch.tensor([6, 2, 0, 0], dtype=torch.int32),
    "layers.1.dropped": torch.tensor(2),
    "layers.3.expert_counts": torch.tensor([6, 6, 6, 6], dtype=torch.int32),
}


def test_load_of_experts():
    """Of 8 slots, 6 and 2 on two of four experts, 2 dropped; and of equal shares."""
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4)
    loads = expert_load(METRICS)
    assert loads == {
        "layers.1": ExpertLoad(3.0, pytest.approx(entropy), 0.25, 8),
        "layers.3": ExpertLoad(1.0, pytest.approx(1.0), 0.0, 24),
    }


def test_side_losses_are_what_is_no_other_number():
    """Names of the step's own numbers and those of segments are none."""
    assert side_losses(METRICS) == {"aux_loss": 0.25}


def experts_record(step: int) -> StepRecord:
    return replace(record(step), side_losses={"aux_loss": 0.25}, expert_load=expert_load(METRICS))


def test_records_of_experts():
    """Numbers are flat: the layer with the highest load, the dropped part of all slots, and each layer by its name."""
    numbers = experts_record(1).numbers()
    assert numbers["aux_loss"] == 0.25
    assert numbers["max_load"] == 3.0
    assert numbers["dropped"] == pytest.approx(2 / 32)
    assert numbers["max_load/layers.3"] == 1.0
    assert numbers["dropped/layers.1"] == 0.25
    assert "entropy/layers.3" in numbers
    assert "max_load" not in record(1).numbers()


def test_picture_of_experts(tmp_path):
    """There is one where records have experts, and none where they have not."""
    assert draw_experts([record(1).numbers()], tmp_path / "none.png", "x") is None
    path = draw_experts([experts_record(step).numbers() for step in (1, 2)], tmp_path / "experts.png", "x")
    assert path is not None
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert not (tmp_path / "none.png").exists()


def test_picture_of_other_numbers(tmp_path):
    """Numbers of a task have one; those that every run has, of experts and of evaluations alone have none."""
    plain = [replace(experts_record(step), side_losses={}, eval_losses={"x": 1.0}).numbers() for step in (1, 2)]
    assert draw_numbers(plain, tmp_path / "none.png", "x") is None
    records = [replace(record(step), task_means={"rewards/margins": 0.5 * step}).numbers() for step in (1, 2)]
    records[1]["eval_rewards/margins"] = 0.75
    path = draw_numbers(records, tmp_path / "numbers.png", "x")
    assert path is not None
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_the_peak_of_a_process_is_its_own():
    """A launcher that took a GiB does not show in the memory of a rank that it started; what the rank takes does."""
    done = subprocess.run([sys.executable, "-c", BALLAST, PEAK], capture_output=True, text=True, check=True)
    assert 2**26 < int(done.stdout) < 2**30
    more = PEAK.replace("; print", "; ballast = b'x' * 2**30; print")
    done = subprocess.run([sys.executable, "-c", more], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 2**30
