"""Collectives of the ranks of one machine through memory that they share: no sockets, and one copy in and one out.

A sum of 0.25 MB over 4 ranks takes a tenth of the CPU time that gloo's loopback connections take, a short message a fifteenth.

Every rank has one file (see `_shared_file.py`) that the other ranks map. For each group the file has semaphores and two buffers,
which are used in turn. A rank writes its part into its buffer of the turn, posts to all others, waits for all others and reads
their buffers. It overwrites a buffer two turns later, when all others have read it: they post in the turn between only after they
have read. Files are sparse: only bytes that were written take memory.
"""

import ctypes
import itertools
import os
import secrets
import socket
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpar.runtime.comm._exchange import exchange
from mpar.runtime.comm._shared_file import (
    ALIGN,
    SEMAPHORE,
    TOKEN,
    Segment,
    aligned,
    available,
    make_semaphore,
    open_segment,
    post,
    take,
    wait_for,
)
from mpar.runtime.comm._shared_mail import MAIL_BYTES, Letter, SharedMail, letter_bytes, letter_places
from mpar.runtime.comm._shared_posts import POSTED_BYTES, SharedPosts, make_post_semaphores, post_bytes

__all__ = ["SharedGroup", "connect"]

CAPACITY = 1 << 21
"""Bytes of a buffer. Longer tensors go in several rounds, so that what was just written is still in a cache when it is read."""

DIRECT_BYTES = 1 << 16
"""Up to this size every rank adds up all of an all_reduce itself, which saves a turn; above, each rank adds up one part."""


def connect(
    groups: Sequence[Sequence[int]], letters: Sequence[Letter] = (), posted: Sequence[int] = ()
) -> "tuple[list[SharedGroup | None], SharedMail | None]":
    """A SharedGroup for each of `groups`, or None for those with a rank on another machine; and a SharedMail, or None.

    groups:  the groups of this rank, each with its ranks in order.
    posted:  for each group the bytes of the longest message that is posted in it, 0 for none; by default none.
    letters: all messages of a step between the stages of this rank's pipeline. The SharedMail carries them; it is None without
             letters, or if one of these ranks is on another machine or sends more than MAIL_BYTES.

    All ranks of the world must call this, with the same number of groups in the same order.
    """
    world, rank, token = dist.get_world_size(), dist.get_rank(), secrets.token_bytes(TOKEN)
    posted = [size if size <= POSTED_BYTES else 0 for size in posted or [0] * len(groups)]
    sizes = [post_bytes(len(group), size) for group, size in zip(groups, posted, strict=True)]
    *posts, mail = itertools.accumulate(sizes, initial=ALIGN + len(groups) * _group_bytes(world))
    own_places = letter_places(letters, rank, mail)
    file = os.memfd_create("mpar") if available() else -1
    if file >= 0:
        os.ftruncate(file, mail + letter_bytes(letters, rank))
        os.pwrite(file, token, 0)
    try:
        places = exchange([socket.gethostname(), os.getpid(), file, token.hex()])
        peers = {end for letter in letters for end in (letter.source, letter.target)}
        wanted = sorted({member for group in groups for member in group} | peers)
        segments = {m: segment for m in wanted if (segment := open_segment(places[rank][0], places[m])) is not None}
        if rank in segments:
            _make_semaphores(segments[rank], len(groups))
            for base, group, size in zip(posts, groups, posted, strict=True):
                make_post_semaphores(segments[rank], base, len(group), size)
            for offset in own_places.values():
                make_semaphore(segments[rank].address(offset))
                make_semaphore(segments[rank].address(offset + SEMAPHORE))
        reached = exchange([*sorted(segments)])  # after this every semaphore exists, and no file is opened any more
    finally:
        if file >= 0:
            os.close(file)
    shared_groups = [
        SharedGroup(rank, group, [segments[member] for member in group], number, posts[number], posted[number])
        if all(set(group) <= set(reached[member]) for member in group)
        else None
        for number, group in enumerate(groups)
    ]
    all_mapped = bool(letters) and all(peers <= set(reached[member]) for member in peers)
    few_bytes = all(letter_bytes(letters, source) <= MAIL_BYTES for source in peers)
    return shared_groups, SharedMail(rank, letters, segments, mail) if all_mapped and few_bytes else None


def _group_bytes(world: int) -> int:
    return aligned(world * SEMAPHORE) + 2 * CAPACITY


def _make_semaphores(segment: Segment, num_groups: int) -> None:
    world = dist.get_world_size()
    for number in range(num_groups):
        for slot in range(world):
            make_semaphore(segment.address(ALIGN + number * _group_bytes(world) + slot * SEMAPHORE))


class SharedGroup:
    """Collectives of one group of ranks, all of which call the same methods with the same shapes in the same order.

    posts: the collectives that are posted now and waited for later.
    """

    def __init__(
        self, rank: int, members: Sequence[int], segments: Sequence[Segment], number: int, posts: int, posted: int
    ) -> None:
        self.members, self.size, self.index = tuple(members), len(members), members.index(rank)
        self.posts = SharedPosts(self.members, self.index, segments, posts, posted)
        world = dist.get_world_size()
        base = ALIGN + number * _group_bytes(world)
        buffers = base + aligned(world * SEMAPHORE)
        self._buffers = [
            [segment.bytes[buffers + turn * CAPACITY : buffers + (turn + 1) * CAPACITY] for segment in segments]
            for turn in (0, 1)
        ]
        self._segments = segments
        others = [i for i in range(self.size) if i != self.index]
        self._post = [ctypes.c_void_p(segments[i].address(base + self.index * SEMAPHORE)) for i in others]
        self._wait = [(i, ctypes.c_void_p(segments[self.index].address(base + i * SEMAPHORE))) for i in others]
        self._views: dict[Any, Tensor] = {}
        self._turn = 0

    def all_gather(self, sources: Sequence[Tensor], dims: Sequence[int]) -> list[Tensor]:
        """All ranks' `sources[k]`, concatenated along `dims[k]`."""
        if sum(aligned(source.numel() * source.element_size()) for source in sources) <= CAPACITY:
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
        sizes = [aligned(source.numel() * source.element_size()) for source in sources]
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
        """`targets[k][i]` becomes the part `[self.index]` of the `sources[k]` of rank i."""
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
        """Write this rank's pieces into its buffer of this turn, and wait until all ranks have done so."""
        for offset, source, _ in pieces:
            self._view(self.index, offset, source).copy_(source)
        self._meet()

    def _view(self, owner: int, offset: int, like: Tensor) -> Tensor:
        """A view of `owner`'s buffer of this turn, from `offset` on, with the shape and dtype of `like`."""
        key = (self._turn, owner, offset, like.shape, like.dtype)
        view = self._views.get(key)
        if view is None:
            span = self._buffers[self._turn][owner][offset : offset + like.numel() * like.element_size()]
            view = self._views[key] = span.view(like.dtype).view(like.shape)
        return view

    def _meet(self) -> None:
        """Wait until all ranks of the group have called this."""
        for semaphore in self._post:
            post(semaphore)
        for i, semaphore in self._wait:
            if not take(semaphore):
                self._wait_for(i, semaphore)

    def _wait_for(self, i: int, semaphore: ctypes.c_void_p) -> None:
        wait_for(semaphore, self.members[self.index], self.members[i], self._segments[i].pid)


def _fold(parts: Sequence[Tensor], op: str, out: Tensor) -> None:
    """`mpar.collectives.fold` into `out`, which overlaps none of the parts."""
    combine = torch.add if op == "sum" else torch.maximum
    combine(parts[0], parts[1], out=out)
    for part in parts[2:]:
        combine(out, part, out=out)


def _rounds(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[int, Tensor, Tensor]]]:
    """For each round its pieces, (offset, source, target). A pair too long for a buffer is cut, but not along its first dim."""
    pieces: list[tuple[int, Tensor, Tensor]] = []
    used = 0
    for pair in pairs:
        for source, target in _cut(*pair):
            size = aligned(source.numel() * source.element_size())
            if used + size > CAPACITY:
                yield pieces
                pieces, used = [], 0
            pieces.append((used, source, target))
            used += size
    yield pieces


def _spans(sources: Sequence[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """The elements of `sources` in order: lists of flat pieces with `limit` elements together, the last with fewer."""
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
