"""`mpar train` with pipeline stages on real processes: the bits of one stage, on any number of them, and what goes wrong."""

import math
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import transformers

from mpar import checkpoint
from mpar.cli._compose import compose_config
from mpar.train import TrainConfig, load_data, make_setup, read_metrics
from tests.cli.conftest import SMALL
from tests.cli.test_train import numbers
from tests.faults.runs import FaultRun

pytestmark = pytest.mark.gloo
LAYERS = ["model.config.num_hidden_layers=4", "data.batch_size=8", "schedule.num_microbatches=4"]
DEEP = [*SMALL, *LAYERS, "progress=false"]


@pytest.mark.full("its runs take 15 s a case; tests/program/test_pipelines.py compares the bits of steps")
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("one", "many"),
    [
        (["mesh=one", "strategy=ddp"], ["mesh=pp2", "strategy=ddp", "schedule=zbv"]),
        (["mesh=fsdp2", "strategy=zero3"], ["mesh=pp2_fsdp2", "strategy=zero3", "schedule=interleaved"]),
        (["mesh=tp2", "strategy=tp_sp"], ["mesh=pp2_tp2", "strategy=tp_sp", "schedule=auto"]),
    ],
    ids=["zbv", "zero3", "tp_sp"],
)
def test_stages_do_not_change_a_bit(one, many, mpar, tmp_path):
    """Losses and gradient norms of all steps are those of the same run without stages; it learns and answers at the end."""
    for name, how in (("one", one), ("many", many)):
        done = mpar("train", *DEEP, *how, "steps=3", f"run_dir={name}")
        assert done.returncode == 0, done.stderr
    assert numbers(tmp_path / "many") == numbers(tmp_path / "one")
    assert numbers(tmp_path / "many")[-1][1] < numbers(tmp_path / "many")[0][1]
    assert "user       hi\nassistant" in done.stdout
    weights = [(tmp_path / name / "hf" / "model.safetensors").read_bytes() for name in ("one", "many")]
    assert weights[0] == weights[1]
    records = read_metrics(tmp_path / "many" / "metrics.jsonl")
    assert len({record["communication_bytes"] for record in records}) == 1
    assert records[0]["communication_bytes"] > 0


@pytest.mark.full("its runs take 40 s; tests/checkpoint moves checkpoints between meshes")
def test_checkpoints_move_between_pipelines(mpar, tmp_path):
    """Two steps on 2 ranks, two on 1 and two on 4 are six steps on 2, to the bit, with an embedding that the first and the last
    stage share; so are the exported weights."""
    how = [*DEEP, "model.config.tie_word_embeddings=true", "strategy=ddp", "steps=6", "checkpoint={every: 2, keep: null}"]
    done = mpar("train", *how, "mesh=pp2", "schedule=zbv", "run_dir=whole")
    assert done.returncode == 0, done.stderr
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    first = tmp_path / "whole" / "checkpoints" / "step_00000002"
    shutil.copytree(first, tmp_path / "run" / "checkpoints" / first.name)
    shutil.copy(tmp_path / "whole" / "metrics.jsonl", tmp_path / "run")
    second = mpar("train", *how, "mesh=one", "run_dir=run")
    assert second.returncode == 0, second.stderr
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000006")
    third = mpar("train", *how, "mesh=pp4", "run_dir=run")
    assert third.returncode == 0, third.stderr
    assert "on from run/checkpoints/step_00000004" in third.stderr
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")
    exported = mpar("export", "run_dir=run", "out=hf")
    assert exported.returncode == 0, exported.stderr
    weights = [(folder / "model.safetensors").read_bytes() for folder in (tmp_path / "hf", tmp_path / "whole" / "hf")]
    assert weights[0] == weights[1]
    answers = [mpar("generate", f"path={path}", "prompt=hi", "max_new_tokens=4").stdout for path in ("hf", "whole")]
    assert answers[0] == answers[1] != ""


@pytest.mark.full("its runs take 20 s; tests/train/test_evaluation.py and the runs of ranks in tests/program evaluate too")
def test_evaluation_is_what_transformers_says(mpar, tmp_path):
    """The loss on held-out rows, on two stages, is that of transformers on the exported weights and the same labels.

    Training is untouched: its numbers are those of a run that evaluates at other times.
    """
    how = [*DEEP, "mesh=pp2", "strategy=ddp", "schedule=zbv", "steps=4", "evaluation.fraction=0.3"]
    done = mpar("train", *how, "evaluation.every=2", "evaluation.batches=2", "run_dir=often", "progress=true")
    assert done.returncode == 0, done.stderr
    assert re.search(r"step 2/4  loss \S+  eval \d", done.stderr)
    seldom = mpar("train", *how, "run_dir=seldom", "evaluation.batches=2")
    assert seldom.returncode == 0, seldom.stderr
    assert numbers(tmp_path / "often") == numbers(tmp_path / "seldom")
    records = read_metrics(tmp_path / "often" / "metrics.jsonl")
    assert ["eval_loss" in record for record in records] == [False, True, False, True]
    config = compose_config("train", TrainConfig, [*how, "run_dir=often"])[0]
    batches = load_data(make_setup(config)).evaluation["held_out"]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "often" / "hf", dtype=torch.float64)
    total, count = 0.0, 0
    for number in range(2):
        batch = batches.batch(number)
        for tokens, labels, documents in zip(batch["tokens"], batch["labels"], batch["documents"], strict=True):
            for document in documents[documents >= 0].unique():  # each alone: packed neighbours are not seen
                here = documents == document
                with torch.no_grad():
                    logits = model(tokens[here][None]).logits[0]
                total += torch.nn.functional.cross_entropy(logits, labels[here], reduction="sum").item()
                count += int((labels[here] >= 0).sum())
    assert records[-1]["eval_loss"] == pytest.approx(total / count, rel=1e-5)
    assert records[-1]["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)


def test_a_rank_killed_under_a_pipeline(tmp_path):
    """SIGKILL of one stage: all ranks are gone in 60 s, and the place of each is told."""
    run = FaultRun(tmp_path, (*LAYERS, "mesh=pp2", "strategy=ddp", "schedule=zbv", "steps=1000000"))
    run.until_training()
    os.kill(run.ranks()[1], signal.SIGKILL)
    assert run.end(60) == 1
    assert "rank 1 was killed by SIGKILL" in run.printed
    assert all(f"\n  rank {rank}, " in run.printed for rank in (0, 1))
    assert "Traceback" not in run.printed


def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Rank 0 sleeps before its tenth message."""
    (tmp_path / "fault").mkdir()
    (tmp_path / "fault" / "sitecustomize.py").write_text(
        f"""import os
if os.environ.get("RANK") == "0":
    import time
    from mpar.runtime.comm import _channels
    send, count = _channels.Channels.send, [0]
    def slow(self, x, peer, message, kind):
        count[0] += 1
        if count[0] == 10:
            time.sleep({seconds})
        send(self, x, peer, message, kind)
    _channels.Channels.send = slow
""",
        encoding="utf-8",
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fault"))


@pytest.mark.full("its runs take 20 s; a killed rank is in the broad tier")
def test_a_message_that_comes_late(mpar, tmp_path, monkeypatch):
    """A message delayed by 5 s delays the run; its numbers are those of a run without delay."""
    how = [*DEEP, "mesh=pp2", "strategy=ddp", "steps=3", "timeout_s=120"]
    assert mpar("train", *how, "run_dir=prompt").returncode == 0
    faulty(tmp_path, monkeypatch, 5)
    late = mpar("train", *how, "run_dir=late")
    assert late.returncode == 0, late.stderr
    assert numbers(tmp_path / "late") == numbers(tmp_path / "prompt")
    assert max(record["step_s"] for record in read_metrics(tmp_path / "late" / "metrics.jsonl")) > 5


@pytest.mark.full("it waits 20 s for a message; a killed rank is in the broad tier")
def test_a_message_that_never_comes(mpar, tmp_path, monkeypatch):
    """All stop after `timeout_s`; the rank that waits names the message and the line that sends it, where the other one is."""
    faulty(tmp_path, monkeypatch, 1000)
    began = time.monotonic()
    done = mpar("train", *DEEP, "mesh=pp2", "strategy=ddp", "steps=5", "timeout_s=15", "run_dir=run")
    assert time.monotonic() - began < 300
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    found = re.search(
        r"rank 1, step (\d+), line \d{4} wait [^:]*: waits for message (\d+) \(\S+( \S+)?\) from rank 0, which sends it in line "
        r"(\d{4})",
        done.stderr,
    )
    assert found, done.stderr
    step, message, _, line = found.groups()
    giving = "(gives|was giving) away"  # whose time is over first is a matter of chance
    assert re.search(rf"\n  rank 0, step {step}, line {line} send [^:]*: {giving} message {message} ", done.stderr)
    sent = (tmp_path / "run" / "program.txt").read_text(encoding="utf-8").splitlines()[1 + int(line)]
    assert sent.startswith(line)
    assert f"message {message} " in sent
    assert not checkpoint.available(tmp_path / "run" / "checkpoints")
