"""Exchanges between the ranks of one machine through memory that they map: no sockets, no copies but those in and out.

A sum of 0.25 MB over 4 ranks costs a tenth of the CPU time that gloo's loopback connections cost, a short message a fifteenth.

Every rank owns one anonymous file (memfd) that its peers open by /proc/<pid>/fd: nothing is left behind when a rank dies.
For each group it holds semaphores and two buffers, used in turn. A rank writes its part into the buffer of the turn, posts to all
peers, waits for all peers, reads theirs. Nobody overwrites a buffer before all have read it: to be two turns later, a rank must
have had the posts of the turn between, which its peers give after they have read. Files are sparse: only what messages touch
takes memory.
"""

import ctypes
import itertools
import mmap
import os
import secrets
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpar.errors import ProgramError

__all__ = ["SharedGroup", "connect"]

CAPACITY = 1 << 21
"""Bytes of a buffer. Longer messages go in rounds: what was just written is still in a cache when a peer reads it."""

DIRECT_BYTES = 1 << 16
"""Up to here every rank adds up a whole all_reduce itself, which saves a turn; beyond, each rank adds up its part."""

_ALIGN, _SEMAPHORE, _TOKEN = 64, 64, 32
_PATIENCE_S = 1800.0  # torch.distributed's own default
_LOOK_S = 0.5  # how often a waiting rank looks whether its peer is alive


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_quick = ctypes.PyDLL(None)  # these calls return at once: letting other threads in would cost more than the call
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class _Segment:
    """The mapped file of one rank."""

    pid: int
    map: mmap.mmap
    bytes: Tensor

    def address(self, offset: int) -> int:
        return self.bytes.data_ptr() + offset


def connect(groups: Sequence[Sequence[int]]) -> list["SharedGroup | None"]:
    """A SharedGroup for each of this rank's groups (ranks in order); None where a member is on another machine.

    All ranks of the world call this at once, each with as many groups in the same order.
    """
    rank, token = dist.get_rank(), secrets.token_bytes(_TOKEN)
    span = len(groups) * _group_bytes(dist.get_world_size())
    own = os.memfd_create("mpar") if hasattr(os, "memfd_create") and hasattr(_quick, "sem_init") else -1
    if own >= 0:
        os.ftruncate(own, _TOKEN + span + _ALIGN)
        os.pwrite(own, token, 0)
    try:
        places: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(places, (socket.gethostname(), os.getpid(), own, token))
        wanted = sorted({member for group in groups for member in group})
        segments = {member: segment for member in wanted if (segment := _open(places[rank][0], places[member])) is not None}
        if rank in segments:
            _make_semaphores(segments[rank], len(groups))
        reached: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reached, sorted(segments))  # after this every semaphore exists, and no file is opened any more
    finally:
        if own >= 0:
            os.close(own)
    return [
        SharedGroup(rank, group, [segments[member] for member in group], number)
        if all(set(group) <= set(reached[member]) for member in group)
        else None
        for number, group in enumerate(groups)
    ]


def _group_bytes(world: int) -> int:
    return _aligned(world * _SEMAPHORE) + 2 * CAPACITY


def _aligned(count: int) -> int:
    return -(-count // _ALIGN) * _ALIGN


def _open(host: str, place: tuple[str, int, int, bytes]) -> _Segment | None:
    """A rank's file, or None if it is not on this machine: the token tells a namesake from the rank."""
    if place[0] != host or place[2] < 0:
        return None
    try:
        file = os.open(f"/proc/{place[1]}/fd/{place[2]}", os.O_RDWR)
    except OSError:
        return None
    try:
        if os.pread(file, _TOKEN, 0) != place[3]:
            return None
        mapped = mmap.mmap(file, os.fstat(file).st_size)
    finally:
        os.close(file)
    return _Segment(place[1], mapped, torch.frombuffer(mapped, dtype=torch.uint8))


def _make_semaphores(segment: _Segment, num_groups: int) -> None:
    world = dist.get_world_size()
    for number in range(num_groups):
        for slot in range(world):
            address = segment.address(_ALIGN + number * _group_bytes(world) + slot * _SEMAPHORE)
            _quick.sem_init(ctypes.c_void_p(address), 1, 0)


class SharedGroup:
    """What one group of ranks exchanges. All its ranks call the same methods with the same shapes in the same order."""

    def __init__(self, rank: int, members: Sequence[int], segments: Sequence[_Segment], number: int) -> None:
        self.members, self.size, self.index = tuple(members), len(members), members.index(rank)
        world = dist.get_world_size()
        base = _ALIGN + number * _group_bytes(world)
        buffers = base + _aligned(world * _SEMAPHORE)
        self._buffers = [
            [segment.bytes[buffers + turn * CAPACITY : buffers + (turn + 1) * CAPACITY] for segment in segments]
            for turn in (0, 1)
        ]
        self._segments = segments
        others = [i for i in range(self.size) if i != self.index]
        self._post = [ctypes.c_void_p(segments[i].address(base + self.index * _SEMAPHORE)) for i in others]
        self._wait = [(i, ctypes.c_void_p(segments[self.index].address(base + i * _SEMAPHORE))) for i in others]
        self._views: dict[Any, Tensor] = {}
        self._turn = 0

    def all_gather(self, sources: Sequence[Tensor], dims: Sequence[int]) -> list[Tensor]:
        """All ranks' `sources[k]`, concatenated along `dims[k]`."""
        if sum(_aligned(source.numel() * source.element_size()) for source in sources) <= CAPACITY:
            return self._all_gather_at_once(sources, dims)
        outs = [
            source.new_empty([n * self.size if i == dim else n for i, n in enumerate(source.shape)])
            for source, dim in zip(sources, dims, strict=True)
        ]
        targets = [out.unflatten(dim, (self.size, -1)).movedim(dim, 0) for out, dim in zip(outs, dims, strict=True)]
        for pieces in _rounds([(source.unsqueeze(0), target) for source, target in zip(sources, targets, strict=True)]):
            self._publish(pieces)
            for offset, source, target in pieces:
                for i in range(self.size):
                    target[i].copy_(source[0] if i == self.index else self._view(i, offset, source)[0])
            self._turn ^= 1
        return outs

    def _all_gather_at_once(self, sources: Sequence[Tensor], dims: Sequence[int]) -> list[Tensor]:
        sizes = [_aligned(source.numel() * source.element_size()) for source in sources]
        offsets = [0, *itertools.accumulate(sizes)]
        for offset, source in zip(offsets, sources, strict=False):
            self._view(self.index, offset, source).copy_(source)
        self._meet()
        outs = [
            torch.cat([self._view(i, offset, source) for i in range(self.size)], dim)
            for offset, source, dim in zip(offsets, sources, dims, strict=False)
        ]
        self._turn ^= 1
        return outs

    def scatter(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """`targets[k][i]` becomes the part for this rank, `[self.index]`, of rank i's `sources[k]`."""
        for pieces in _rounds(list(zip(sources, targets, strict=True))):
            self._publish(pieces)
            for offset, source, target in pieces:
                for i in range(self.size):
                    target[i].copy_(source[i] if i == self.index else self._view(i, offset, source)[self.index])
            self._turn ^= 1

    def reduce_scatter(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """`targets[k]` becomes the sum in rank order of all ranks' `sources[k][self.index]`."""
        for pieces in _rounds([(source, target.unsqueeze(0)) for source, target in zip(sources, targets, strict=True)]):
            self._publish(pieces)
            for offset, source, target in pieces:
                _fold([self._view(i, offset, source)[self.index] for i in range(self.size)], "sum", target[0])
            self._turn ^= 1

    def all_reduce(self, sources: Sequence[Tensor], out: Tensor, op: str) -> None:
        """`out`, one contiguous dim, becomes the sum or maximum in rank order of all ranks' `sources`, one after the other."""
        direct = self.size == 2 or out.nbytes <= DIRECT_BYTES
        limit = CAPACITY // out.element_size()
        for chunk, pieces in zip(out.split(limit), _spans(sources, limit), strict=True):
            torch.cat(pieces, out=self._view(self.index, 0, chunk))
            self._meet()
            if direct:
                _fold([self._view(i, 0, chunk) for i in range(self.size)], op, chunk)
                self._turn ^= 1
                continue
            bounds = [chunk.numel() * i // self.size for i in range(self.size + 1)]
            parts = [chunk[a:b] for a, b in itertools.pairwise(bounds)]
            low, high = bounds[self.index : self.index + 2]
            folded = [self._view(i, 0, chunk)[low:high] for i in range(self.size)]
            self._turn ^= 1
            _fold(folded, op, self._view(self.index, 0, parts[self.index]))
            self._meet()
            for i, part in enumerate(parts):
                part.copy_(self._view(i, 0, part))
            self._turn ^= 1

    def _publish(self, pieces: Iterable[tuple[int, Tensor, Tensor]]) -> None:
        """Write this rank's pieces into its buffer of the turn, and wait until all have done so."""
        for offset, source, _ in pieces:
            self._view(self.index, offset, source).copy_(source)
        self._meet()

    def _view(self, owner: int, offset: int, like: Tensor) -> Tensor:
        """Where `owner` keeps a tensor like this one in the present turn."""
        key = (self._turn, owner, offset, like.shape, like.dtype)
        view = self._views.get(key)
        if view is None:
            span = self._buffers[self._turn][owner][offset : offset + like.numel() * like.element_size()]
            view = self._views[key] = span.view(like.dtype).view(like.shape)
        return view

    def _meet(self) -> None:
        for semaphore in self._post:
            _quick.sem_post(semaphore)
        for i, semaphore in self._wait:
            if _quick.sem_trywait(semaphore):
                self._wait_for(i, semaphore)

    def _wait_for(self, i: int, semaphore: ctypes.c_void_p) -> None:
        """Wait for rank i's post. Raises ProgramError if its process is gone, or after the patience of torch.distributed."""
        begun = time.monotonic()
        while True:
            until = time.time() + _LOOK_S
            limit = _Timespec(int(until), int(until % 1 * 1e9))
            if _libc.sem_timedwait(semaphore, ctypes.byref(limit)) == 0:
                return
            who = f"rank {self.members[i]} (process {self._segments[i].pid})"
            if not _alive(self._segments[i].pid) and _quick.sem_trywait(semaphore):
                raise ProgramError(
                    f"rank {self.members[self.index]} waited for {who}, which has ended; see that rank's own error"
                )
            if time.monotonic() - begun > _PATIENCE_S:
                raise ProgramError(
                    f"rank {self.members[self.index]} waited {_PATIENCE_S:.0f} s for {who}, which is still running"
                )


def _alive(pid: int) -> bool:
    """Whether a process runs; one that ended but was not collected by its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _fold(parts: Sequence[Tensor], op: str, out: Tensor) -> None:
    """`mpar.collectives.fold` into `out`, which overlaps none of the parts."""
    combine = torch.add if op == "sum" else torch.maximum
    combine(parts[0], parts[1], out=out)
    for part in parts[2:]:
        combine(out, part, out=out)


def _rounds(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[int, Tensor, Tensor]]]:
    """(offset, source, target) of the pieces of each round; a pair too long for a buffer is cut along its dims but the first."""
    pieces: list[tuple[int, Tensor, Tensor]] = []
    used = 0
    for pair in pairs:
        for source, target in _cut(*pair):
            size = _aligned(source.numel() * source.element_size())
            if used + size > CAPACITY:
                yield pieces
                pieces, used = [], 0
            pieces.append((used, source, target))
            used += size
    yield pieces


def _spans(sources: Sequence[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """The elements of `sources` in order, in flat pieces, `limit` elements at a time; the last may be shorter."""
    pieces: list[Tensor] = []
    room = limit
    for source in sources:
        flat = source.reshape(-1)
        while flat.numel() > room:
            pieces.append(flat[:room])
            yield pieces
            flat, pieces, room = flat[room:], [], limit
        pieces.append(flat)
        room -= flat.numel()
    yield pieces


def _cut(source: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    if source.numel() * source.element_size() <= CAPACITY:
        yield source, target
        return
    dim = max(range(1, source.ndim), key=lambda d: (source.shape[d], -d))
    half = source.shape[dim] // 2
    for first, length in ((0, half), (half, source.shape[dim] - half)):
        yield from _cut(source.narrow(dim, first, length), target.narrow(dim, first, length))
