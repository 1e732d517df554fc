"""Long context and experts: torch's programs compute what they should, lines say who is compared with whom."""

import pytest
import torch

from bench._beside import summarise, table
from bench._launch import launch
from bench.context import _torch as context
from bench.context.__main__ import main as context_main
from bench.experts.__main__ import main as experts_main
from bench.spmd._run import LossesDiffer
from tests.patience import PATIENCE_S


def test_torch_programs_are_right():
    """On two ranks attention and experts of every peer give the outputs and gradients of whole tensors."""
    lines = dict(line.split(": ") for line in launch(2, "tests.bench.spread", [], timeout_s=PATIENCE_S).splitlines())
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
    assert (ours["median_ms"], ours["cpu_ms"], theirs["over"]) == (3000.0, 2000.0, {})
    assert ours["over"] == {"torch:ring": {"wall": [0.25] * 3, "cpu": [1.0] * 3}}
    assert "torch:ring | 0.250 (0.250 to 0.250)" in table([ours, theirs])
    ranks[0]["torch:ring"]["loss"] = [2.1]
    with pytest.raises(LossesDiffer):
        summarise(measured, {}, {})


@pytest.mark.parametrize("main", [context_main, experts_main])
def test_missing_peers_are_explained(main, tmp_path, monkeypatch, capsys):
    """Without the peers nothing runs, and it says how to name their folder."""
    monkeypatch.setattr("sys.argv", ["bench", "gloo", "--peers", str(tmp_path)])
    assert main() == 1
    assert "--peers" in capsys.readouterr().err
