"""Memory that processes of one machine share: a file of each process without a name, mapped by the others, and semaphores in it.

The file (memfd) is opened by /proc/<pid>/fd, so nothing is left behind when a process dies.
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
"""Bytes: a cache line, so that neighbours do not disturb each other; room for a semaphore; what tells a namesake from a rank."""

_PATIENCE_S = 1800.0  # torch.distributed's own default
_LOOK_S = 0.5  # how often a waiting rank looks whether its peer is alive


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_quick = ctypes.PyDLL(None)  # these calls return at once: letting other threads in would cost more than the call
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Segment:
    """The mapped file of one rank."""

    pid: int
    map: mmap.mmap
    bytes: Tensor

    def address(self, offset: int) -> int:
        """Of a byte of the file, in this process."""
        return self.bytes.data_ptr() + offset


def aligned(count: int) -> int:
    """`count` rounded up to whole cache lines."""
    return -(-count // ALIGN) * ALIGN


def open_segment(host: str, place: tuple[str, int, int, bytes]) -> Segment | None:
    """A rank's file, or None if it is not on this machine: the token tells a namesake from the rank."""
    if place[0] != host or place[2] < 0:
        return None
    try:
        file = os.open(f"/proc/{place[1]}/fd/{place[2]}", os.O_RDWR)
    except OSError:
        return None
    try:
        if os.pread(file, TOKEN, 0) != place[3]:
            return None
        mapped = mmap.mmap(file, os.fstat(file).st_size)
    finally:
        os.close(file)
    return Segment(place[1], mapped, torch.frombuffer(mapped, dtype=torch.uint8))


def available() -> bool:
    """Whether this machine has what is needed."""
    return hasattr(os, "memfd_create") and hasattr(_quick, "sem_init")


def make_semaphore(address: int) -> ctypes.c_void_p:
    """A new semaphore of count 0 between processes."""
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
    """Take what rank `other` will post.

    Raises ProgramError if its process is gone, or after the patience of torch.distributed.
    """
    begun = time.monotonic()
    while True:
        until = time.time() + _LOOK_S
        limit = _Timespec(int(until), int(until % 1 * 1e9))
        if _libc.sem_timedwait(semaphore, ctypes.byref(limit)) == 0:
            return
        who = f"rank {other} (process {process})"
        if not _alive(process) and not take(semaphore):
            raise ProgramError(f"rank {rank} waited for {who}, which has ended; see that rank's own error")
        if time.monotonic() - begun > _PATIENCE_S:
            raise ProgramError(f"rank {rank} waited {_PATIENCE_S:.0f} s for {who}, which is still running")


def _alive(pid: int) -> bool:
    """Whether a process runs; one that ended but was not collected by its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
