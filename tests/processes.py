"""Processes that tests start, and how long they wait for them."""

import os
import pathlib
import subprocess
import sys

__all__ = ["PATIENCE_S", "torchrun"]

PATIENCE_S = 480.0  # for two cores that other work keeps busy; less than faulthandler_timeout in pyproject.toml
ROOT = pathlib.Path(__file__).resolve().parents[1]


def torchrun(worker: pathlib.Path, *words: str, num_ranks: int = 4) -> subprocess.CompletedProcess[str]:
    """The finished launch of the file `worker` on `num_ranks` processes, which may import the tests."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), str(worker)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*command, *words], capture_output=True, text=True, timeout=PATIENCE_S, check=False, cwd=ROOT, env=environment
    )
