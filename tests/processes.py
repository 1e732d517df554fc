"""Processes that tests start, and how long they wait for them."""

import os
import pathlib
import subprocess
import sys

__all__ = ["PATIENCE_S", "torchrun"]

PATIENCE_S = 480.0  # for two cores that other work keeps busy; less than faulthandler_timeout in pyproject.toml
ROOT = pathlib.Path(__file__).resolve().parents[1]


def torchrun(worker: pathlib.Path, *words: str, num_ranks: int = 4, succeeds: bool = True) -> subprocess.CompletedProcess[str]:
    """The finished launch of the file `worker` on `num_ranks` processes, which may import the tests.

    Raises:
        AssertionError: it was to succeed and did not; with the end of what it wrote.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), str(worker)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *words], capture_output=True, text=True, timeout=PATIENCE_S, check=False, cwd=ROOT, env=environment
    )
    assert done.returncode == 0 or not succeeds, done.stderr[-3000:]
    return done
