"""A rank that dies or stands still: the error names the cause that came first, and where every rank was."""

import os
import signal
import time

import pytest

from tests.faults.runs import ENDLESS, EVEN, numbers

pytestmark = pytest.mark.gloo


def test_a_killed_rank_stops_all_and_each_place_is_told(start):
    """SIGKILL in mid-step: the launcher says who died and where each rank was."""
    run = start(*ENDLESS)
    run.until_training()
    ranks = run.ranks()
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    assert run.end(60) == 1
    assert "rank 1 was killed by SIGKILL" in run.printed
    assert "\n  rank 0, " in run.printed
    assert "\n  rank 1, " in run.printed
    assert "Traceback" not in run.printed
    run.check_nothing_left(ranks)


@pytest.mark.full("it waits for a time to be over; a rank that is killed is found in the broad tier too")
@pytest.mark.parametrize("where", ["step", "start-up"])
def test_a_rank_that_stands_still_is_named(start, where):
    """SIGSTOP: within `timeout_s` and ten seconds the error says that the rank stood still, and who waited for it."""
    run = start(*ENDLESS, "timeout_s=15")
    if where == "step":
        run.until_training()
    else:
        run.until(lambda: len(run.ranks()) == 2)
    ranks = run.ranks()
    os.kill(ranks[1], signal.SIGSTOP)
    began = time.monotonic()
    assert run.end(120) == 1
    if where == "step":
        assert time.monotonic() - began < 15 + 10
        assert "over tp with rank 1" in run.printed or "agree" in run.printed
    else:
        assert "start-up" in run.printed
    assert "rank 1 stood still" in run.printed
    assert "killed by SIGKILL" not in run.printed
    run.check_nothing_left(ranks)


@pytest.mark.full("it starts ranks three times; going on after a kill is in the broad tier")
def test_a_lost_rank_is_started_again(start, undisturbed):
    """`restarts=1`: after a kill the run goes on from its newest checkpoint, and ends with the bits of an undisturbed run."""
    run = start(*EVEN, "steps=150", "checkpoint.every=10", "restarts=1")
    run.until_training(20)
    os.kill(run.ranks()[0], signal.SIGKILL)
    assert run.end() == 0, run.printed
    assert "restart 1 of 1: goes on from run/checkpoints/step_" in run.printed
    assert numbers(run.run_dir) == undisturbed(150)
