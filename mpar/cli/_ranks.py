"""The processes of the ranks of one machine: starts them, looks at them, and ends them."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["MALLOC", "Ranks", "oom_kills"]

_LOOPBACK = "lo"
_TUNABLES = {"mmap_threshold": 32 << 20, "trim_threshold": 16 << 30, "hugetlb": 1}
MALLOC = {"GLIBC_TUNABLES": ":".join(f"glibc.malloc.{name}={value}" for name, value in _TUNABLES.items())}
"""What a step gives back stays with the process, which does not fault it in again in the next step: blocks of up to 32 MB, the
most that glibc allows. Larger ones come in pages of 2 MB, where the system has them on demand. The variable is read once, when a
process begins."""


class Ranks:
    """Processes `python -m MODULE ARGUMENTS`, one for each rank, in sessions of their own: what the keyboard sends goes
    to their launcher alone. What they listen on is the loopback interface. glibc keeps their memory for them, unless
    `GLIBC_TUNABLES` is set.
    """

    def __init__(
        self,
        size: int,
        arguments: Sequence[str],
        inherited: Sequence[int],
        temp: Path,
        *,
        module: str = "mpar.cli._worker",
        first: int = 0,
    ) -> None:
        """inherited: descriptors that the processes keep open. temp: the folder for their temporary files. first: the ranks
        before it are not started here."""
        self._first = first
        common = {**MALLOC, **os.environ, "TMPDIR": str(temp)}
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(first, size):
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            interfaces = {"GLOO_SOCKET_IFNAME": _LOOPBACK, "NCCL_SOCKET_IFNAME": _LOOPBACK}
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                env={**common, **{name: str(number) for name, number in numbers.items()}, **interfaces},
                pass_fds=inherited,
                start_new_session=True,
            )
            self._processes.append(process)

    def ended(self) -> dict[int, int]:
        """The exit codes of the ranks that have ended; minus the number of a signal that killed one."""
        codes = {rank: process.poll() for rank, process in enumerate(self._processes, self._first)}
        return {rank: code for rank, code in codes.items() if code is not None}

    def tell(self, number: int) -> None:
        """Send the signal `number` to all ranks."""
        for process in self._processes:
            process.send_signal(number)

    def standing_still(self) -> list[int]:
        """The ranks whose processes are stopped by a signal or a debugger: neither running nor waiting."""
        return [rank for rank, process in enumerate(self._processes, self._first) if _state(process.pid) in ("T", "t")]

    def wait(self, timeout_s: float) -> None:
        """Wait until all ranks have ended, but not longer than this."""
        end = time.monotonic() + timeout_s
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))

    def kill(self) -> None:
        """Kill the ranks that have not ended, and wait until they are gone."""
        self.tell(signal.SIGKILL)
        for process in self._processes:
            process.wait()


def oom_kills() -> int:
    """How many processes of this control group the kernel has killed for lack of memory; 0 where it does not count them."""
    try:
        group = Path("/proc/self/cgroup").read_text(encoding="ascii").rpartition("::")[2].strip().lstrip("/")
        lines = Path("/sys/fs/cgroup", group, "memory.events").read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def _state(pid: int) -> str:
    """The letter of the state of a process; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return ""
