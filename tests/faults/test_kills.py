"""SIGKILL of the launcher, of a rank, of all at once: nothing that was saved is lost, and no process outlives its launcher."""

import os
import random
import signal
import time

import pytest

from mpar import checkpoint
from tests.faults.runs import ENDLESS, EVEN, FaultRun, last_step, numbers

pytestmark = pytest.mark.gloo


@pytest.mark.cases(1)
@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("target", ["launcher", "rank", "group"])
def test_nothing_is_lost(start, undisturbed, extent, target, mode):
    """A run is killed again and again, at seeded moments, and goes on each time; in the end its numbers have the bits of a run
    that nothing disturbed. After every kill the newest checkpoint is good and at least as new as before."""
    draw, newest, saving = random.Random(f"{target} {mode}"), -1, ("checkpoint.every=7", f"checkpoint.mode={mode}")
    for _ in range(extent(1, 2, 40)):
        run = start(*ENDLESS, *saving)
        before = last_step(run.run_dir)
        run.until(lambda run=run: len(run.ranks()) == 2)
        if draw.random() < 0.7:  # the other kills come while the ranks start
            run.until(lambda run=run, before=before: last_step(run.run_dir) > before + 2)
        time.sleep(draw.random() * 0.5)
        kill(run, target, draw)
        found = checkpoint.latest(run.run_dir / "checkpoints")
        assert found is not None or newest < 0
        if found is not None:
            checkpoint.verify(found)
            step = int(found.name.removeprefix("step_"))
            assert step >= newest
            newest = step
    steps = last_step(run.run_dir) + 5
    last = start(*EVEN, *saving, f"steps={steps}")
    assert last.end() == 0, last.printed
    assert numbers(last.run_dir) == undisturbed(steps)


def kill(run: FaultRun, target: str, draw: random.Random) -> None:
    """Kill a rank, the launcher, or all of them; within ten seconds nothing of the run is left but its folder."""
    ranks = run.ranks()
    if target == "rank":
        os.kill(draw.choice(ranks), signal.SIGKILL)
        assert run.end() == 1
        assert "was killed by SIGKILL" in run.printed
    else:
        for pid in [*(ranks if target == "group" else ()), run.process.pid]:
            os.kill(pid, signal.SIGKILL)
        run.end()
    run.check_nothing_left(ranks)
