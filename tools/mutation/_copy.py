"""A copy of the tree in which tests run: it is changed for one mutant, and then restored."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from threading import Event

from tools.mutation import _pytest_plugin
from tools.mutation._mutants import Mutant
from tools.mutation._tree import copy_tree

__all__ = ["Copy", "Ended"]

PLUGIN = Path(_pytest_plugin.__file__)
NO_WORKERS = ("-n0",) if find_spec("xdist") else ()
"""No workers of pytest-xdist: several copies run at once already, and a worker starts slower than most mutants' tests run."""
PATIENCE_S = 3.0
"""Seconds that tests have, once they are asked to stop, to end the processes that they started."""


@dataclass(frozen=True)
class Ended:
    """How a run of tests ended: what pytest returned (None if it was stopped), a test that did not pass, the last output."""

    code: int | None
    failed: str | None
    seconds: float
    output: str


class Copy:
    """The tree `source`, copied to `folder` / "tree"."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.folder, self.root = folder, folder / "tree"
        self.num_writes = 0
        (folder / "plugin").mkdir(parents=True)
        (folder / "tmp").mkdir()
        (folder / "plugin" / PLUGIN.name).write_text(PLUGIN.read_text(encoding="utf-8"), encoding="utf-8")
        copy_tree(source, self.root)

    @contextmanager
    def spoiled(self, mutant: Mutant) -> Iterator[None]:
        """While this lasts, the copy has the mutant in it."""
        path = self.root / mutant.path
        source = path.read_text(encoding="utf-8")
        try:
            self._write(path, mutant.applied(source))
            yield
        finally:
            self._write(path, source)

    def _write(self, path: Path, text: str) -> None:
        """Write a file with a new time of change: Python compiles a module again if its size or time (in seconds) differs."""
        path.write_text(text, encoding="utf-8")
        self.num_writes += 1
        os.utime(path, (self.num_writes, self.num_writes))

    def run_tests(self, tests: Sequence[str], timeout_s: float, stop: Event) -> Ended:
        """Run these tests in this order, and stop at the first that fails."""
        chosen, noted = self.folder / "chosen.json", self.folder / "noted.json"
        chosen.write_text(json.dumps(tests), encoding="utf-8")
        noted.unlink(missing_ok=True)
        files = sorted({test.partition("::")[0] for test in tests})
        words = ["-x", f"--chosen-tests={chosen}", f"--note-durations={noted}", "--tb=short", *NO_WORKERS, *files]
        start = time.monotonic()
        code, output = self.pytest(words, timeout_s, stop)
        results = json.loads(noted.read_text(encoding="utf-8")) if noted.exists() else {}
        failed = next((test for test, (_, passed) in results.items() if not passed), None)
        return Ended(code, failed, time.monotonic() - start, output)

    def pytest(
        self, words: Sequence[str], timeout_s: float, stop: Event, *, show: bool = False, also: dict[str, str] | None = None
    ) -> tuple[int | None, str]:
        """What pytest returns for these arguments (None if it took too long or `stop` was set), and the end of its output.

        show: the output goes to the terminal instead. also: variables that are added to its environment.
        """
        command = [sys.executable, "-m", "pytest", "-p", PLUGIN.stem, "-p", "no:cacheprovider", "--no-header", *words]
        log = self.folder / "output.txt"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env=self._environment() | (also or {}),
                stdin=subprocess.DEVNULL,
                stdout=None if show else output,
                stderr=None if show else subprocess.STDOUT,
                start_new_session=True,  # so that processes of tests can be ended with them, and Ctrl-C reaches only us
            )
            try:
                code = _wait(process, timeout_s, stop)
            finally:
                _end(process)
        return code, log.read_text(encoding="utf-8", errors="replace")[-3000:]

    def _environment(self) -> dict[str, str]:
        paths = f"{self.root}{os.pathsep}{self.folder / 'plugin'}"
        return {"OMP_NUM_THREADS": "1"} | dict(os.environ) | {"PYTHONPATH": paths, "TMPDIR": str(self.folder / "tmp")}


def _wait(process: subprocess.Popen[bytes], timeout_s: float, stop: Event) -> int | None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and not stop.is_set():
        try:
            return process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            pass
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started. They are asked to stop first, so that they can clean up."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=PATIENCE_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass
