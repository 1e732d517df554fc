"""Start N local ranks of one module, and collect what rank 0 prints. If a rank fails, all are stopped."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["RankFailed", "launch"]

ROOT = Path(__file__).resolve().parents[1]


class RankFailed(Exception):
    """A rank ended with an error."""


def launch(num_ranks: int, module: str, args: Sequence[str], *, timeout_s: float = 1800.0) -> str:
    """Run `python -m module args` as `num_ranks` ranks with one thread each. Raises RankFailed with what the rank printed."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    common = {
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1,
        "MKL_NUM_THREADS": 1,
        "GLOO_SOCKET_IFNAME": "lo",
        "PEERS_LAUNCHED_AT": time.time(),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }
    with tempfile.TemporaryDirectory() as folder:
        outs = [open(Path(folder) / f"out{rank}", "w+") for rank in range(num_ranks)]  # noqa: SIM115  (closed below)
        errs = [open(Path(folder) / f"err{rank}", "w+") for rank in range(num_ranks)]  # noqa: SIM115
        processes = []
        for rank in range(num_ranks):
            env = os.environ | {key: str(value) for key, value in (common | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            command = [sys.executable, "-m", module, *args]
            processes.append(subprocess.Popen(command, env=env, cwd=ROOT, stdout=outs[rank], stderr=errs[rank]))
        try:
            failed = _wait(processes, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        texts = []
        for file in (outs[0], *errs):
            file.seek(0)
            texts.append(file.read())
        for file in (*outs, *errs):
            file.close()
        if failed is not None:
            raise RankFailed(f"rank {failed} of {module} {' '.join(args)} failed:\n{texts[1 + failed][-3000:]}")
        return texts[0]


def _wait(processes: list[subprocess.Popen], deadline: float) -> int | None:
    """The first rank that failed, or None when all ended well."""
    while any(process.poll() is None for process in processes):
        for rank, process in enumerate(processes):
            if process.poll() not in (None, 0):
                return rank
        if time.monotonic() > deadline:
            return next(rank for rank, process in enumerate(processes) if process.poll() is None)
        time.sleep(0.05)
    return next((rank for rank, process in enumerate(processes) if process.returncode), None)
