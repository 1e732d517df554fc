"""The benchmark's arithmetic: ratios, intervals, the losses that must agree, the peers that may be absent."""

import random

import pytest

from bench._losses import LossesDiffer, check_losses
from bench._peers import PeersMissing, find_peers
from bench._statistics import paired_ratio
from bench.spmd._run import summarise
from bench.spmd._table import table


def test_ratio_is_the_median_of_pairs():
    """Noise that both members of a pair share does not touch the ratio."""
    noise = [1.0, 5.0, 2.0, 9.0, 1.0]
    ratio = paired_ratio([[2.0 * x for x in noise]] * 5, [[4.0 * x for x in noise]] * 5)
    assert (ratio.median, ratio.low, ratio.high, ratio.count, ratio.passes) == (0.5, 0.5, 0.5, 25, 5)


def test_interval_covers_the_truth():
    """Of 60 experiments whose true median ratio is 1, at least 50 have it in their 95 % interval."""
    draw = random.Random(1)
    covered = 0
    for _ in range(60):
        ours, theirs = ([[draw.lognormvariate(0.0, 0.2) for _ in range(12)] for _ in range(5)] for _ in range(2))
        ratio = paired_ratio(ours, theirs)
        covered += ratio.low <= 1.0 <= ratio.high
    assert covered >= 50


def test_losses_that_differ_stop_the_benchmark():
    """A difference of 2e-5 in one step raises and names the variants; the floors, which compute no loss, are left out."""
    same = {"mpar": [6.0, 5.0], "torch": [6.0, 5.00004], "floor_eager": [1.0, 1.0]}
    assert check_losses(same) < 1e-5
    with pytest.raises(LossesDiffer, match=r"step 1(.|\n)*mpar(.|\n)*torch"):
        check_losses(same | {"torch": [6.0, 5.0001]})


def test_a_loss_that_is_not_a_number_stops_the_benchmark():
    """NaN equals nothing, so it is no agreement."""
    with pytest.raises(LossesDiffer):
        check_losses({"mpar": [float("nan")], "torch": [5.0]})


def test_a_step_lasts_as_long_as_its_slowest_rank():
    """Wall time is the maximum over ranks, CPU time the sum, and the bar is compared with the interval's lower end."""
    mpar = [
        {"wall": [1.0], "cpu": [1.0], "main_cpu": [1.0], "loss": [2.0]},
        {"wall": [3.0], "cpu": [1.0], "main_cpu": [1.0], "loss": [2.0]},
    ]
    torch = [{"wall": [12.0], "cpu": [4.0], "main_cpu": [4.0], "loss": [2.0]}] * 2
    passes = [{"foreign_cores": 0.0, "ranks": [{"mpar": a, "torch": b} for a, b in zip(mpar, torch, strict=True)]}] * 5
    ours, theirs = summarise({"config": "nano", "mesh": "tp4+sp"}, passes)
    assert (ours.number("median_ms"), ours.number("cpu_ms")) == (3000.0, 2000.0)
    assert theirs.numbers("mpar_over_this_wall") == theirs.numbers("mpar_over_this_cpu") == [0.25, 0.25, 0.25]
    assert theirs.number("bar") == 0.35 and theirs.figures["under_bar"]
    assert "0.35 met" in table([ours, theirs])


def test_missing_peers_are_explained(tmp_path):
    """Without the peers there is a message that names the folder and the ways to give another."""
    with pytest.raises(PeersMissing, match=r"torch_spmd.py(.|\n)*--peers(.|\n)*MPAR_PEERS"):
        find_peers(tmp_path)
