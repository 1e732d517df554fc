"""Messages of a group that are posted now and waited for later, through memory that the ranks of one machine share.

A message is left in a slot of the sender's file: its readers are told by a semaphore each, and tell in return when they have
copied it. All ranks of a group post and wait in the same order, so that all of them give a message the same slot, and a slot is
given again only after a wait that comes before in that order: no rank can wait for one that waits for it.
`python -m bench.parallel context` compares it with gloo's loopback connections (bench/results).
"""

import ctypes
import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from mpar.runtime.comm._shared_file import SEMAPHORE, Segment, aligned, make_semaphore, post, take, wait_for

__all__ = ["POSTED_BYTES", "Post", "SharedPosts", "make_post_semaphores", "packed_bytes", "post_bytes"]

SLOTS = 4
"""Messages of a group that can be on their way at once: a ring has two, one of blocks and one of their gradients."""

POSTED_BYTES = 1 << 32
"""Longer messages go another way. Files are sparse: only what messages touch takes memory."""

_OFFSET = torch.int64


@dataclass(frozen=True)
class Post:
    """A message on its way."""

    wait: Callable[[], None]


def _heads(size: int) -> tuple[int, int]:
    """Bytes of a slot's semaphores, two for each reader: full, taken; of the offsets at which parts begin."""
    return 2 * size * SEMAPHORE, aligned((size + 1) * _OFFSET.itemsize)


def post_bytes(size: int, capacity: int) -> int:
    """What the slots of a group of `size` ranks take in each file, for messages of up to `capacity` bytes."""
    return SLOTS * (sum(_heads(size)) + aligned(capacity)) if capacity else 0


def packed_bytes(tensors: Sequence[Tensor]) -> int:
    """What a message of these tensors takes in a slot."""
    return sum(aligned(x.nbytes) for x in tensors)


def make_post_semaphores(segment: Segment, base: int, size: int, capacity: int) -> None:
    """Those of all slots, before any rank uses them."""
    step = post_bytes(size, capacity) // SLOTS
    for slot, i in itertools.product(range(SLOTS if capacity else 0), range(2 * size)):
        make_semaphore(segment.address(base + slot * step + i * SEMAPHORE))


class SharedPosts:
    """What one rank of a group posts and what is posted to it."""

    def __init__(self, members: Sequence[int], index: int, segments: Sequence[Segment], base: int, capacity: int) -> None:
        self._members, self._index, self._segments = members, index, segments
        self._base, self._capacity = base, capacity
        self._step = post_bytes(len(members), capacity) // SLOTS
        self._free = list(range(SLOTS))
        self._readers: list[Sequence[int]] = [()] * SLOTS  # of the message before

    def fits(self, nbytes: int = 0) -> bool:
        """Whether a message can go this way now; `nbytes` is what it has on every rank, 0 where ranks know their own alone.

        The answer is the same on all ranks.
        """
        return bool(self._free) and 0 < self._capacity >= nbytes

    def shift(self, xs: Sequence[Tensor], values: Sequence[Tensor]) -> Post:
        """`xs` to the next rank; `values` become those of the rank before."""
        following, before = (self._index + 1) % len(self._members), (self._index - 1) % len(self._members)
        slot = self._claim([following])
        for x, place in zip(xs, self._places(self._index, slot, xs), strict=True):
            place.copy_(x)
        post(self._semaphore(self._index, slot, following))

        def wait() -> None:
            self._await(before, slot)
            for value, place in zip(values, self._places(before, slot, values), strict=True):
                value.copy_(place)
            self._release(before, slot)
            heapq.heappush(self._free, slot)

        return Post(wait)

    def exchange(self, rows: Tensor, leaving: Sequence[int], coming: Sequence[int], values: Sequence[Tensor]) -> Post:
        """`rows`, `leaving[i]` of them to rank i, one after the other; `values[i]` become the `coming[i]` rows of rank i."""
        assert rows.nbytes <= self._capacity, f"{rows.nbytes} bytes of rows, where at most {self._capacity} were expected"
        slot = self._claim(self._others())
        starts = [0, *itertools.accumulate(leaving)]
        self._offsets(self._index, slot).copy_(torch.tensor(starts, dtype=_OFFSET))
        self._rows(self._index, slot, 0, rows).copy_(rows)
        for i in self._others():
            post(self._semaphore(self._index, slot, i))
        values[self._index].copy_(rows[starts[self._index] : starts[self._index + 1]])

        def wait() -> None:
            for i in self._others():
                self._await(i, slot)
                start, stop = self._offsets(i, slot)[self._index : self._index + 2].tolist()
                assert stop - start == coming[i], f"{stop - start} rows came from rank {self._members[i]}, not {coming[i]}"
                values[i].copy_(self._rows(i, slot, start, values[i]))
                self._release(i, slot)
            heapq.heappush(self._free, slot)

        return Post(wait)

    def _others(self) -> list[int]:
        return [i for i in range(len(self._members)) if i != self._index]

    def _claim(self, readers: Sequence[int]) -> int:
        """The first free slot, once all readers of what was in it are done."""
        slot = heapq.heappop(self._free)
        for i in self._readers[slot]:
            self._take(self._semaphore(self._index, slot, len(self._members) + i), i)
        self._readers[slot] = readers
        return slot

    def _await(self, owner: int, slot: int) -> None:
        self._take(self._semaphore(owner, slot, self._index), owner)

    def _take(self, semaphore: ctypes.c_void_p, i: int) -> None:
        """What rank i of the group posts."""
        if not take(semaphore):
            wait_for(semaphore, self._members[self._index], self._members[i], self._segments[i].pid)

    def _release(self, owner: int, slot: int) -> None:
        post(self._semaphore(owner, slot, len(self._members) + self._index))

    def _semaphore(self, owner: int, slot: int, number: int) -> ctypes.c_void_p:
        """Of a slot: full for reader `number`; behind these, taken by reader `number` less the size of the group."""
        return ctypes.c_void_p(self._segments[owner].address(self._base + slot * self._step + number * SEMAPHORE))

    def _offsets(self, owner: int, slot: int) -> Tensor:
        semaphores, length = _heads(len(self._members))
        start = self._base + slot * self._step + semaphores
        return self._segments[owner].bytes[start : start + length].view(_OFFSET)[: len(self._members) + 1]

    def _span(self, owner: int, slot: int, start: int, like: Tensor) -> Tensor:
        """A tensor like this one that begins at byte `start` of a message."""
        start += self._base + slot * self._step + sum(_heads(len(self._members)))
        return self._segments[owner].bytes[start : start + like.nbytes].view(like.dtype).view(like.shape)

    def _places(self, owner: int, slot: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        starts = itertools.accumulate((aligned(x.nbytes) for x in tensors), initial=0)
        return [self._span(owner, slot, start, x) for start, x in zip(starts, tensors, strict=False)]

    def _rows(self, owner: int, slot: int, first: int, like: Tensor) -> Tensor:
        return self._span(owner, slot, first * prod(like.shape[1:]) * like.element_size(), like)
