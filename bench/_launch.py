"""Start local ranks of modules, and collect what each rank 0 prints. If a rank fails, all are stopped."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Launch", "RankFailed", "launch", "launch_together"]

ROOT = Path(__file__).resolve().parents[1]


class RankFailed(Exception):
    """A rank ended with an error."""


@dataclass(frozen=True)
class Launch:
    """`python -m module args` as `num_ranks` ranks with one thread each. `env`: variables beside those of this process."""

    num_ranks: int
    module: str
    args: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)


class _Ranks:
    """The processes of a launch. `folder`: what they print lies there."""

    def __init__(self, launch: Launch, folder: Path) -> None:
        self.launch = launch
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        common = {
            "WORLD_SIZE": launch.num_ranks,
            "LOCAL_WORLD_SIZE": launch.num_ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": 1,
            "MKL_NUM_THREADS": 1,
            "GLOO_SOCKET_IFNAME": "lo",
            "PEERS_LAUNCHED_AT": time.time(),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        }
        self._out = folder / "out"
        self._errors = [folder / f"err{rank}" for rank in range(launch.num_ranks)]
        self._processes = []
        for rank, errors in enumerate(self._errors):
            told = {key: str(value) for key, value in (common | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            command = [sys.executable, "-m", launch.module, *launch.args]
            with open(self._out if rank == 0 else os.devnull, "w") as out, open(errors, "w") as err:
                env = os.environ | launch.env | told
                self._processes.append(subprocess.Popen(command, env=env, cwd=ROOT, stdout=out, stderr=err))

    def running(self) -> bool:
        return any(process.poll() is None for process in self._processes)

    def printed(self) -> str:
        return self._out.read_text()

    def stop(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    def raise_for(self, *, late: bool) -> None:
        """Raise RankFailed for a rank that failed; for one that has not ended too if it is `late`."""
        for rank, process in enumerate(self._processes):
            if process.poll() not in (None, 0) or (late and process.poll() is None):
                words = f"{self.launch.module} {' '.join(self.launch.args)}"
                raise RankFailed(f"rank {rank} of {words} failed:\n{self._errors[rank].read_text()[-3000:]}")


def launch(num_ranks: int, module: str, args: Sequence[str], *, timeout_s: float = 1800.0) -> str:
    """What rank 0 of one launch printed. Raises RankFailed with what the rank that failed has printed."""
    return launch_together([Launch(num_ranks, module, args)], timeout_s=timeout_s)[0]


def launch_together(launches: Sequence[Launch], *, timeout_s: float = 1800.0) -> list[str]:
    """What rank 0 of each launch printed; all run at the same time. Raises RankFailed as `launch` does."""
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        started = []
        for number, each in enumerate(launches):
            place = Path(folder, str(number))
            place.mkdir()
            started.append(_Ranks(each, place))
            stack.callback(started[-1].stop)
        while any(ranks.running() for ranks in started):
            late = time.monotonic() > deadline
            for ranks in started:
                ranks.raise_for(late=late)
            time.sleep(0.05)
        for ranks in started:
            ranks.raise_for(late=False)
        return [ranks.printed() for ranks in started]
