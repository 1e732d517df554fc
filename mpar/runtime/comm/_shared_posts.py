"""Messages of a group that are posted now and waited for later, through memory that the ranks of one machine share.

A message is written into a slot of the sender's file. The sender posts one semaphore for each reader, and each reader posts
another when it has copied the message. All ranks of a group post and wait in the same order, so all choose the same slot for a
message. A slot is used again only after the wait for its previous message, so two ranks never wait for each other.
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
"""Messages of a group that can be on their way at one time: a ring needs two, one of blocks and one of their gradients."""

POSTED_BYTES = 1 << 32
"""Longer messages use the backend. Files are sparse: only bytes that were written take memory."""

_OFFSET = torch.int64


@dataclass(frozen=True)
class Post:
    """A message on its way; `wait` returns when it has arrived."""

    wait: Callable[[], None]


def _heads(size: int) -> tuple[int, int]:
    """Bytes of what a slot has before its message: two semaphores for each rank, full and taken; the first row of each part."""
    return 2 * size * SEMAPHORE, aligned((size + 1) * _OFFSET.itemsize)


def post_bytes(size: int, capacity: int) -> int:
    """The bytes that the slots of a group of `size` ranks take in each file, for messages of at most `capacity` bytes."""
    return SLOTS * (sum(_heads(size)) + aligned(capacity)) if capacity else 0


def packed_bytes(tensors: Sequence[Tensor]) -> int:
    """The bytes that a message of these tensors takes in a slot."""
    return sum(aligned(x.nbytes) for x in tensors)


def make_post_semaphores(segment: Segment, base: int, size: int, capacity: int) -> None:
    """Make the semaphores of all slots; no rank may use them before."""
    slot_bytes = post_bytes(size, capacity) // SLOTS
    for slot, i in itertools.product(range(SLOTS if capacity else 0), range(2 * size)):
        make_semaphore(segment.address(base + slot * slot_bytes + i * SEMAPHORE))


class SharedPosts:
    """The messages that one rank of a group posts, and those that are posted to it."""

    def __init__(self, members: Sequence[int], index: int, segments: Sequence[Segment], base: int, capacity: int) -> None:
        self._members, self._index, self._segments = members, index, segments
        self._base, self._capacity = base, capacity
        self._slot_bytes = post_bytes(len(members), capacity) // SLOTS
        self._free = list(range(SLOTS))
        self._readers: list[Sequence[int]] = [()] * SLOTS  # by slot: the readers of its last message

    def fits(self, nbytes: int = 0) -> bool:
        """Whether a message can be posted here now. `nbytes` is its size, which is the same on every rank, or 0 if it may differ.

        The answer is the same on all ranks.
        """
        return bool(self._free) and 0 < self._capacity >= nbytes

    def shift(self, xs: Sequence[Tensor], values: Sequence[Tensor]) -> Post:
        """Post `xs` to the next rank; `values` become the `xs` of the previous rank."""
        following, previous = (self._index + 1) % len(self._members), (self._index - 1) % len(self._members)
        slot = self._claim([following])
        for x, place in zip(xs, self._places(self._index, slot, xs), strict=True):
            place.copy_(x)
        post(self._semaphore(self._index, slot, following))

        def wait() -> None:
            self._await(previous, slot)
            for value, place in zip(values, self._places(previous, slot, values), strict=True):
                value.copy_(place)
            self._release(previous, slot)
            heapq.heappush(self._free, slot)

        return Post(wait)

    def exchange(self, rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int], values: Sequence[Tensor]) -> Post:
        """Post `num_sent[i]` of `rows` to rank i, in the order of ranks; `values[i]` becomes the `num_received[i]` from it."""
        assert rows.nbytes <= self._capacity, f"{rows.nbytes} bytes of rows, where at most {self._capacity} were expected"
        slot = self._claim(self._others())
        starts = [0, *itertools.accumulate(num_sent)]
        self._offsets(self._index, slot).copy_(torch.tensor(starts, dtype=_OFFSET))
        self._rows(self._index, slot, 0, rows).copy_(rows)
        for i in self._others():
            post(self._semaphore(self._index, slot, i))
        values[self._index].copy_(rows[starts[self._index] : starts[self._index + 1]])

        def wait() -> None:
            for i in self._others():
                self._await(i, slot)
                start, stop = self._offsets(i, slot)[self._index : self._index + 2].tolist()
                count, expected = stop - start, num_received[i]
                assert count == expected, f"{count} rows came from rank {self._members[i]}, not {expected}"
                values[i].copy_(self._rows(i, slot, start, values[i]))
                self._release(i, slot)
            heapq.heappush(self._free, slot)

        return Post(wait)

    def _others(self) -> list[int]:
        return [i for i in range(len(self._members)) if i != self._index]

    def _claim(self, readers: Sequence[int]) -> int:
        """Take the first free slot, after all readers of its last message have copied it."""
        slot = heapq.heappop(self._free)
        for i in self._readers[slot]:
            self._take(self._semaphore(self._index, slot, len(self._members) + i), i)
        self._readers[slot] = readers
        return slot

    def _await(self, owner: int, slot: int) -> None:
        self._take(self._semaphore(owner, slot, self._index), owner)

    def _take(self, semaphore: ctypes.c_void_p, i: int) -> None:
        """Count a semaphore down, waiting for rank i of the group to post it."""
        if not take(semaphore):
            wait_for(semaphore, self._members[self._index], self._members[i], self._segments[i].pid)

    def _release(self, owner: int, slot: int) -> None:
        post(self._semaphore(owner, slot, len(self._members) + self._index))

    def _semaphore(self, owner: int, slot: int, number: int) -> ctypes.c_void_p:
        """Semaphore `number` of a slot of `owner`: first "full" for each rank of the group, then "taken" for each."""
        return ctypes.c_void_p(self._segments[owner].address(self._base + slot * self._slot_bytes + number * SEMAPHORE))

    def _offsets(self, owner: int, slot: int) -> Tensor:
        semaphores, length = _heads(len(self._members))
        start = self._base + slot * self._slot_bytes + semaphores
        return self._segments[owner].bytes[start : start + length].view(_OFFSET)[: len(self._members) + 1]

    def _span(self, owner: int, slot: int, start: int, like: Tensor) -> Tensor:
        """A view of a message from byte `start` on, with the shape and dtype of `like`."""
        start += self._base + slot * self._slot_bytes + sum(_heads(len(self._members)))
        return self._segments[owner].bytes[start : start + like.nbytes].view(like.dtype).view(like.shape)

    def _places(self, owner: int, slot: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        starts = itertools.accumulate((aligned(x.nbytes) for x in tensors), initial=0)
        return [self._span(owner, slot, start, x) for start, x in zip(starts, tensors, strict=False)]

    def _rows(self, owner: int, slot: int, first: int, like: Tensor) -> Tensor:
        return self._span(owner, slot, first * prod(like.shape[1:]) * like.element_size(), like)
