"""Memory that processes of one machine share: each has a file without a name, with semaphores in it, which the others map.

The others open the file (a memfd) by /proc/<pid>/fd, so nothing remains of it when the processes have ended.
"""

import ctypes
import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mpar.errors import ProgramError

__all__ = [
    "ALIGN",
    "SEMAPHORE",
    "TOKEN",
    "Segment",
    "aligned",
    "available",
    "make_semaphore",
    "open_segment",
    "post",
    "take",
    "wait_for",
]

ALIGN, SEMAPHORE, TOKEN = 64, 64, 32
"""Sizes in bytes: a cache line, to which tensors are aligned; the room of a semaphore; a token, by which a file is recognised."""

_PATIENCE_S = 1800.0  # torch.distributed's own default
_LOOK_S = 0.5  # how often a waiting rank checks whether the other process is alive


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_quick = ctypes.PyDLL(None)  # PyDLL keeps the GIL: these calls return at once, and to release it would cost more
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Segment:
    """The mapped file of one rank."""

    pid: int
    map: mmap.mmap
    bytes: Tensor

    def address(self, offset: int) -> int:
        """The address in this process of the byte at `offset`."""
        return self.bytes.data_ptr() + offset


def aligned(count: int) -> int:
    """`count` rounded up to whole cache lines."""
    return -(-count // ALIGN) * ALIGN


def open_segment(host: str, place: tuple[str, int, int, str]) -> Segment | None:
    """The file of a rank, whose `place` is (host, pid, file number, token in hex); None if it is not on this machine. Another
    machine or container may have the same host name and pid, but not the same token.
    """
    if place[0] != host or place[2] < 0:
        return None
    try:
        file = os.open(f"/proc/{place[1]}/fd/{place[2]}", os.O_RDWR)
    except OSError:
        return None
    try:
        if os.pread(file, TOKEN, 0) != bytes.fromhex(place[3]):
            return None
        mapped = mmap.mmap(file, os.fstat(file).st_size)
    finally:
        os.close(file)
    return Segment(place[1], mapped, torch.frombuffer(mapped, dtype=torch.uint8))


def available() -> bool:
    """Whether this machine has memfd files and semaphores."""
    return hasattr(os, "memfd_create") and hasattr(_quick, "sem_init")


def make_semaphore(address: int) -> ctypes.c_void_p:
    """A new semaphore with count 0, which several processes can use."""
    semaphore = ctypes.c_void_p(address)
    _quick.sem_init(semaphore, 1, 0)
    return semaphore


def post(semaphore: ctypes.c_void_p) -> None:
    """Count up by one."""
    _quick.sem_post(semaphore)


def take(semaphore: ctypes.c_void_p) -> bool:
    """Count down by one if that is possible at once."""
    return _quick.sem_trywait(semaphore) == 0


def wait_for(semaphore: ctypes.c_void_p, rank: int, other: int, process: int) -> None:
    """Count down by one, waiting until rank `other`, in the process `process`, has posted.

    Raises ProgramError if that process has ended, or after as long as torch.distributed waits by default.
    """
    begun = time.monotonic()
    while True:
        deadline = time.time() + _LOOK_S
        limit = _Timespec(int(deadline), int(deadline % 1 * 1e9))
        if _libc.sem_timedwait(semaphore, ctypes.byref(limit)) == 0:
            return
        who = f"rank {other} (process {process})"
        if not _alive(process) and not take(semaphore):
            raise ProgramError(f"rank {rank} waited for {who}, which has ended; see that rank's own error")
        if time.monotonic() - begun > _PATIENCE_S:
            raise ProgramError(f"rank {rank} waited {_PATIENCE_S:.0f} s for {who}, which is still running")


def _alive(pid: int) -> bool:
    """Whether a process runs. A zombie, which ended but was not collected by its parent, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
