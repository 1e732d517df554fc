"""Long context and experts: torch's programs compute what they should, lines say who is compared with whom."""

import pytest
import torch

from bench._launch import launch
from bench._losses import LossesDiffer
from bench.parallel import _context_torch as context
from bench.parallel.__main__ import main
from bench.parallel._run import summarise
from bench.parallel._subjects import SUBJECTS
from bench.parallel._table import table
from tests.processes import PATIENCE_S


def test_torch_programs_are_right():
    """On two ranks attention and experts of every peer give the outputs and gradients of whole tensors."""
    lines = dict(line.split(": ") for line in launch(2, "tests.bench.parallel", [], timeout_s=PATIENCE_S).splitlines())
    assert set(lines) == {*(f"context {m}" for m in context.METHODS), "experts all_to_all", "experts all_gather"}
    assert all(float(error) < 2e-5 for error in lines.values()), lines


def test_zigzag_is_even():
    """Every index is there once, and the rows of a causal mask hold as many keys on each rank."""
    order = context.zigzag(24, 3)
    assert order.flatten().sort().values.equal(torch.arange(24)) and len(set(order.sum(1).tolist())) == 1


def test_a_step_is_compared_with_its_peers():
    """Wall time is the slowest rank's, CPU time the sum; peers that did not run are left out, losses that differ stop it."""

    def rank(wall: float, loss: float = 2.0) -> dict:
        return {"wall": [wall], "cpu": [1.0], "main_cpu": [1.0], "loss": [loss]}

    ranks = [{"mpar:ring": rank(1.0), "torch:ring": rank(4.0)}, {"mpar:ring": rank(3.0), "torch:ring": rank(12.0)}]
    measured = [{"foreign_cores": 0.0, "ranks": ranks}] * 5
    ours, theirs = summarise(measured, {"mpar:ring": ("torch:ring", "absent")}, {"ranks": 2, "config": "nano"})
    assert (ours.number("median_ms"), ours.number("cpu_ms"), theirs.table("over")) == (3000.0, 2000.0, {})
    assert ours.table("over") == {"torch:ring": {"wall": [0.25] * 3, "cpu": [1.0] * 3}}
    assert "torch:ring | 0.250 (0.250 to 0.250)" in table([ours, theirs])
    ranks[0]["torch:ring"]["loss"] = [2.1]
    with pytest.raises(LossesDiffer):
        summarise(measured, {}, {})


@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=lambda subject: subject.name)
def test_every_variant_is_known(subject):
    """Those that run if nothing else is asked for are ours or a peer of one of ours, and each of ours has a plan."""
    peers = {peer for pairs in subject.pairs.values() for peer in pairs}
    assert set(subject.variants) <= subject.pairs.keys() | peers
    plans = {name: subject.plan(name.partition(":")[2], 4) for name in subject.pairs}
    assert all(plan.mesh.size == 4 for plan in plans.values())
    assert {name for name, plan in plans.items() if plan.num_slices > 1} == {name for name in plans if "/" in name}


@pytest.mark.parametrize("subject", SUBJECTS)
def test_missing_peers_are_explained(subject, tmp_path, monkeypatch, capsys):
    """Without the peers nothing runs, and it says how to name their folder."""
    monkeypatch.setattr("sys.argv", ["bench", subject, "--peers", str(tmp_path)])
    assert main() == 1
    assert "--peers" in capsys.readouterr().err
