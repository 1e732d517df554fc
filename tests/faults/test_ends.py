"""However a run ends, nothing of it is left in shared folders."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.runs import ENDLESS, FaultRun

pytestmark = pytest.mark.gloo

Disturb = Callable[[FaultRun], None]
"""What happens to a run that has been started."""


def nothing(run: FaultRun) -> None:
    """It ends by itself."""


def at_start(number: int) -> Disturb:
    """A signal while the ranks start."""

    def disturb(run: FaultRun) -> None:
        run.until(lambda: run.ranks())
        run.process.send_signal(number)

    return disturb


def in_training(number: int, times: int = 1) -> Disturb:
    """A signal, so many times, while the run trains."""

    def disturb(run: FaultRun) -> None:
        run.until_training()
        for _ in range(times):
            run.process.send_signal(number)

    return disturb


def kill_rank(run: FaultRun) -> None:
    run.until_training()
    os.kill(run.ranks()[1], signal.SIGKILL)


def kill_group(run: FaultRun) -> None:
    run.until_training()
    for pid in (run.process.pid, *run.ranks()):
        os.kill(pid, signal.SIGKILL)


def kill_saving(run: FaultRun) -> None:
    """The launcher is killed while its ranks save."""
    run.until_training()
    run.until_saving()
    run.process.kill()


ENDS: dict[str, tuple[tuple[str, ...], Disturb]] = {
    "all steps": (("steps=2",), nothing),
    "all steps, on one rank": (("steps=2", "mesh=one", "strategy=ddp"), nothing),
    "all steps, each saved": (("steps=9", "checkpoint.every=1"), nothing),
    "a bad value": (("steps=0",), nothing),
    "no data": (("data.sources=[nowhere.jsonl]",), nothing),
    "no program": (("schedule.num_slices=7",), nothing),
    "a loss that is not finite": (("optimizer.lr=1e30", "optimizer.clip_norm=null", "steps=40"), nothing),
    "no time": ((*ENDLESS, "time_limit=1s"), nothing),
    "time over": ((*ENDLESS, "time_limit=25s"), nothing),
    "a sweep": (("-m", "optimizer.lr=1e-3,2e-3", "steps=1"), nothing),
    "a sweep, interrupted": (("-m", "optimizer.lr=1e-3,2e-3", *ENDLESS), at_start(signal.SIGINT)),
    **{f"{number.name} at the start": (ENDLESS, at_start(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)},
    **{f"{number.name} in training": (ENDLESS, in_training(number)) for number in (signal.SIGINT, signal.SIGHUP, signal.SIGKILL)},
    "two SIGINT": (ENDLESS, in_training(signal.SIGINT, 2)),
    "a killed rank": (ENDLESS, kill_rank),
    "a killed rank, restarted": ((*ENDLESS, "restarts=1", "time_limit=40s"), kill_rank),
    "all killed": (ENDLESS, kill_group),
    "all killed, with W&B": ((*ENDLESS, "wandb=true"), kill_group),
    "killed while saving": ((*ENDLESS, "checkpoint.every=1"), kill_saving),
}


def shared() -> set[str]:
    """What lies in the folders that all processes share, as far as it could be of a run."""
    found = {str(path) for folder in ("/tmp", "/var/tmp", "/dev/shm") for path in Path(folder).glob("*")}
    return {path for path in found if any(word in path for word in ("mpar", "torch", "gloo", "wandb", "safetensors"))}


def test_nothing_is_left_in_shared_folders(start, some, request, monkeypatch):
    """No process and no temporary file is there ten seconds after the end. `--attack`, which has the machine for itself, looks
    at the folders of all processes, too."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    before = shared()
    for name in some(list(ENDS)):
        words, disturb = ENDS[name]
        run = start(*words, name=name)
        disturb(run)
        ranks = run.ranks()
        run.end()
        run.check_nothing_left(ranks)
    if request.config.option.attack:
        assert shared() <= before, shared() - before
