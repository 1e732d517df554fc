"""Runs a module as ranks behind links, and gives them a way to change the rate while they run."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench._launch import RankFailed
from bench._machine import ROOT
from bench.slow_links._links import LINK, Links, enter

__all__ = ["run_ranks", "set_rate", "wire_bytes"]

_CONTROL = "SLOW_LINKS_CONTROL"
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def run_ranks(links: Links, module: str, args: Sequence[str], *, timeout_s: float = 1200.0) -> str:
    """Run `python -m module args` as one rank behind each link. Returns what rank 0 has printed, once all have ended.

    Raises RankFailed, with what the first failed rank has printed on stderr, if one fails or time is over; none is left then.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs, tempfile.TemporaryDirectory() as folder:
        threading.Thread(target=_serve, args=(links, ours), daemon=True).start()
        common = {
            "WORLD_SIZE": len(links.spaces),
            "LOCAL_WORLD_SIZE": len(links.spaces),
            "MASTER_ADDR": links.address(0),
            "MASTER_PORT": 29500,  # nobody else is in these namespaces
            "GLOO_SOCKET_IFNAME": LINK,
            "OMP_NUM_THREADS": 1,
            "MKL_NUM_THREADS": 1,
            _CONTROL: theirs.fileno(),
            "PEERS_LAUNCHED_AT": time.time(),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        }
        processes: list[subprocess.Popen] = []
        try:
            for rank, space in enumerate(links.spaces):
                env = os.environ | {key: str(value) for key, value in (common | {"RANK": rank, "LOCAL_RANK": rank}).items()}
                with Path(folder, f"out{rank}").open("w") as out, Path(folder, f"err{rank}").open("w") as err:
                    process = subprocess.Popen(
                        [sys.executable, "-W", "ignore", "-m", module, *args],
                        env=env,
                        cwd=ROOT,
                        stdout=out,
                        stderr=err,
                        pass_fds=[theirs.fileno()] if rank == 0 else [],
                        preexec_fn=partial(_begin, space),
                    )
                processes.append(process)
            failed = _wait(processes, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if failed is not None:
            text = Path(folder, f"err{failed}").read_text()
            raise RankFailed(f"rank {failed} of {module} {' '.join(args)} failed:\n{text[-3000:]}")
        sys.stderr.write(Path(folder, "err0").read_text())
        return Path(folder, "out0").read_text()


def set_rate(rate: str) -> None:
    """Change the rate of all links. Rank 0 calls it, while no rank sends."""
    with socket.socket(fileno=os.dup(int(os.environ[_CONTROL]))) as control:
        control.sendall(rate.encode())
        answer = control.recv(4096).decode()
    if answer != "done":
        raise RuntimeError(f"the rate was not changed to {rate}: {answer}")


def wire_bytes() -> tuple[int, int]:
    """(received, sent) by this rank over its link so far, with all headers."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == LINK:
            values = counters.split()
            return int(values[0]), int(values[8])
    raise RuntimeError(f"there is no {LINK} here: this process is no rank of bench.slow_links")


def _begin(space: int) -> None:
    """Before a rank's program: move into its namespace, and end with this process."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    enter(space)


def _serve(links: Links, control: socket.socket) -> None:
    """Answer rank 0 until it is gone."""
    try:
        while rate := control.recv(4096).decode():
            try:
                links.set_rate(rate)
                control.sendall(b"done")
            except Exception as error:
                control.sendall(f"{type(error).__name__}: {error}".encode())
    except OSError:  # closed, at the end
        return


def _wait(processes: Sequence[subprocess.Popen], deadline: float) -> int | None:
    """The first rank that failed or is not done in time; None if all ended well."""
    while any(process.poll() is None for process in processes):
        failed = next((rank for rank, process in enumerate(processes) if process.poll()), None)
        if failed is not None:
            return failed
        if time.monotonic() > deadline:
            return next(rank for rank, process in enumerate(processes) if process.poll() is None)
        time.sleep(0.05)
    return next((rank for rank, process in enumerate(processes) if process.returncode), None)
