"""Messages between ranks of one machine: each has a place of its own in the sender's file, and two semaphores.

Sending copies the tensor there, receiving copies it out. Sending waits only if the message of the step before is still there.
`python -m bench.schedules gloo` compares it with gloo's loopback connections (bench/results).
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from mpar.runtime.comm._shared_file import SEMAPHORE, Segment, aligned, post, take, wait_for

__all__ = ["MAIL_BYTES", "Letter", "SharedMail", "letter_bytes", "letter_places"]

MAIL_BYTES = 1 << 30
"""What one rank may send in a step in this way: the memory is given back when the process ends."""


@dataclass(frozen=True)
class Letter:
    """A message that its ranks know of before they begin: its number, its size, from which rank to which."""

    message: int
    source: int
    target: int
    bytes: int


def letter_bytes(letters: Sequence[Letter], source: int) -> int:
    """What the messages of `source` take in its file."""
    return sum(2 * SEMAPHORE + aligned(letter.bytes) for letter in letters if letter.source == source)


def letter_places(letters: Sequence[Letter], source: int, base: int) -> dict[int, int]:
    """Where each message of `source` begins in its file, from `base` on: "full", "taken", then its bytes."""
    places = {}
    for letter in letters:
        if letter.source == source:
            places[letter.message] = base
            base += 2 * SEMAPHORE + aligned(letter.bytes)
    return places


class SharedMail:
    """The messages of one rank. All ranks that exchange any have the same `letters`, in the same order."""

    def __init__(self, rank: int, letters: Sequence[Letter], segments: Mapping[int, Segment], base: int) -> None:
        self._rank = rank
        self._letters: dict[int, tuple[Letter, Segment, ctypes.c_void_p, ctypes.c_void_p, Tensor]] = {}
        self._sent: set[int] = set()  # in the step before, at least
        for source in {letter.source for letter in letters}:
            segment, places = segments[source], letter_places(letters, source, base)
            for letter in letters:
                if letter.source == source and rank in (letter.source, letter.target):
                    place = places[letter.message]
                    data = segment.bytes[place + 2 * SEMAPHORE : place + 2 * SEMAPHORE + letter.bytes]
                    full, taken = (ctypes.c_void_p(segment.address(place + i * SEMAPHORE)) for i in (0, 1))
                    other = segments[letter.target if source == rank else source]
                    self._letters[letter.message] = (letter, other, full, taken, data)
        self._buffers: dict[int, Tensor] = {}

    def send(self, x: Tensor, message: int) -> None:
        """Leave `x` where its receiver finds it."""
        letter, other, full, taken, data = self._letters[message]
        if message in self._sent and not take(taken):
            wait_for(taken, self._rank, letter.target, other.pid)
        self._sent.add(message)
        data.view(x.dtype).view(x.shape).copy_(x)
        post(full)

    def receive(self, buffer: Tensor, message: int) -> None:
        """Note where a message will go."""
        self._buffers[message] = buffer

    def wait(self, message: int) -> None:
        """Until the message is in its buffer; one that was sent is done already."""
        buffer = self._buffers.pop(message, None)
        if buffer is None:
            return
        letter, other, full, taken, data = self._letters[message]
        if not take(full):
            wait_for(full, self._rank, letter.source, other.pid)
        assert prod(buffer.shape) * buffer.element_size() == letter.bytes
        buffer.copy_(data.view(buffer.dtype).view(buffer.shape))
        post(taken)
