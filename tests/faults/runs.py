"""Runs of `mpar train` that tests disturb."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from mpar import checkpoint
from mpar.train import Phase, Place, read_metrics, read_place
from tests.cli.conftest import SMALL, environment
from tests.processes import PATIENCE_S

__all__ = ["ENDLESS", "EVEN", "GONE_S", "FaultRun", "check_stopped", "last_step", "numbers"]

EVEN = ("optimizer.lr_decay=constant", "optimizer.warmup_steps=0")
"""With a learning rate that is the same in every step, a run of fewer steps has the first numbers of a run of more."""
ENDLESS = (*EVEN, "steps=10000000")
LINE = {"before": "nothing was saved", "after": "to go on, run the same command with run_dir=run"}
GONE_S = 10.0  # within this time ranks are gone once their launcher is


class FaultRun:
    """A run in the background, in `folder`/run, with a folder for temporary files of its own."""

    def __init__(self, folder: Path, args: tuple[str, ...]) -> None:
        self.run_dir, self.temp = folder / "run", folder / "temp"
        self.temp.mkdir(exist_ok=True)
        self._file = folder / f"printed-{len(list(folder.glob('printed-*')))}.txt"
        command = [sys.executable, "-m", "mpar", "train", *SMALL, "run_dir=run", "progress=false", *args]
        with self._file.open("w", encoding="utf-8") as printed:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment() | {"TMPDIR": str(self.temp)},
                stdout=subprocess.DEVNULL,
                stderr=printed,
                start_new_session=True,
                preexec_fn=_hear_signals,
            )

    @property
    def printed(self) -> str:
        """What the run has printed on stderr so far."""
        return self._file.read_text(encoding="utf-8")

    def places(self) -> list[Place]:
        """Where the ranks are that have written it."""
        found = [read_place(path) for path in sorted(self.temp.glob("mpar-*/rank-*.place"))]
        return [place for place in found if place is not None]

    def until(self, condition: Callable[[], object]) -> None:
        """Wait until `condition()` is true. The run must still be going on then."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, self.printed
            assert self.process.poll() is None, self.printed
            time.sleep(0.01)

    def until_training(self, steps: int = 3) -> None:
        """Wait until some steps were recorded."""
        self.until(lambda: len(read_metrics(self.run_dir / "metrics.jsonl")) >= steps and self.places())

    def until_saving(self) -> None:
        """Wait until a rank saves."""
        self.until(lambda: any(place.phase == Phase.SAVE for place in self.places()))

    def ranks(self) -> list[int]:
        """The process ids of the ranks, by rank."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                status = (path / "status").read_text(encoding="utf-8")
                variables = (path / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            rank = [int(v.partition(b"=")[2]) for v in variables if v.startswith(b"RANK=")]
            if f"\nPPid:\t{self.process.pid}\n" in status and rank:
                found[rank[0]] = int(path.name)
        return [found[rank] for rank in sorted(found)]

    def end(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait until the run has ended; its exit code."""
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """Kill the run and its ranks, stopped ones too."""
        for pid in (*self.ranks(), self.process.pid):
            if self.process.poll() is None or pid != self.process.pid:
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def check_nothing_left(self, ranks: list[int]) -> None:
        """The ranks are gone within GONE_S, and so are all temporary files."""
        deadline = time.monotonic() + GONE_S
        while any(_runs(pid) for pid in ranks) or any(self.temp.iterdir()):
            assert time.monotonic() < deadline, ([pid for pid in ranks if _runs(pid)], list(self.temp.iterdir()))
            time.sleep(0.05)


def _hear_signals() -> None:
    """Signals that this process was started to ignore, as by nohup or in the background of a script, are none to the run."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _runs(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not collected by its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def check_stopped(run: FaultRun, code: int, *, saved: bool) -> None:
    """The exit code, one line at the end, no traceback, no temporary file; a checkpoint if `saved`."""
    ranks = run.ranks()
    assert run.end() == code, run.printed
    text = run.printed
    assert "Traceback" not in text
    last = text.splitlines()[-1]
    assert last.startswith("stopped by ")
    assert LINE["after" if saved else "before"] in last
    assert (checkpoint.latest(run.run_dir / "checkpoints") is not None) == saved
    run.check_nothing_left(ranks)


def last_step(run_dir: Path) -> int:
    """The last step that a run has recorded; 0 if there is none."""
    return max((record["step"] for record in read_metrics(run_dir / "metrics.jsonl")), default=0)


def numbers(run_dir: Path) -> list[tuple]:
    """What must be the same however often a run was interrupted."""
    return [(r["step"], r["loss"], r["grad_norm"], r["lr"], r["tokens"]) for r in read_metrics(run_dir / "metrics.jsonl")]
