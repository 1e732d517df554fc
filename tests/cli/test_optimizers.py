"""Optimizers whose state is not like AdamW's, through the command line: they learn, and a run that was stopped keeps its bits."""

import math

import pytest
import torch

from mpar import checkpoint
from mpar.train import read_metrics
from tests.cli.conftest import SMALL, run_mpar

WORDS = [*SMALL, "mesh=fsdp2", "strategy=zero3", "checkpoint.every=4", "checkpoint.keep=null", "optimizer.lr_decay=constant"]


@pytest.mark.gloo
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "words", [["optimizer=muon"], ["optimizer=soap", "optimizer.precondition_frequency=3"]], ids=lambda w: w[0]
)
def test_going_on_keeps_the_bits(words, tmp_path):
    """Eight steps in one run, and in two of which the second goes on from step 4: equal state, and the loss has fallen."""
    for run_dir, steps in (("one", 8), ("two", 4), ("two", 8)):
        more = [f"run_dir={run_dir}", f"steps={steps}", "optimizer.warmup_ratio=null", "optimizer.min_ratio=null"]
        done = run_mpar(["train", *WORDS, *words, *more], tmp_path)
        assert done.returncode == 0, done.stderr
    readers = [checkpoint.Reader(tmp_path / name / "checkpoints" / "step_00000008") for name in ("one", "two")]
    with readers[0] as one, readers[1] as two:
        assert set(one.tensors) == set(two.tensors) and any(name.startswith("opt.") for name in one.tensors)
        assert all(torch.equal(one.read(name), two.read(name)) for name in one.tensors)
    losses = [record["loss"] for record in read_metrics(tmp_path / "two" / "metrics.jsonl")]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.5 and all(map(math.isfinite, losses))
