"""Records of steps."""

import json

import pytest

from mpar import models
from mpar.train import MetricsFile, StepRecord, flops_per_token, read_metrics, tensorboard_writer

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
