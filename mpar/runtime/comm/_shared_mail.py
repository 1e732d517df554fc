"""Messages between ranks of one machine: each has its own place in the file of its sender, and two semaphores.

To send copies the tensor to this place, to receive copies it from there. A send waits only if the same message of the previous
step was not yet received.
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
"""The most bytes that one rank may send in a step in this way; the memory is freed when the process ends."""


@dataclass(frozen=True)
class Letter:
    """A message that is known before the program runs: its number, its ranks and its size."""

    message: int
    source: int
    target: int
    bytes: int


def letter_bytes(letters: Sequence[Letter], source: int) -> int:
    """The bytes that the messages of `source` take in its file."""
    return sum(2 * SEMAPHORE + aligned(letter.bytes) for letter in letters if letter.source == source)


def letter_places(letters: Sequence[Letter], source: int, base: int) -> dict[int, int]:
    """The offset of each message of `source` in its file, from `base` on: semaphores "full" and "taken", then its bytes."""
    places = {}
    for letter in letters:
        if letter.source == source:
            places[letter.message] = base
            base += 2 * SEMAPHORE + aligned(letter.bytes)
    return places


class SharedMail:
    """The messages that one rank sends and receives. All these ranks have the same `letters`, in the same order."""

    def __init__(self, rank: int, letters: Sequence[Letter], segments: Mapping[int, Segment], base: int) -> None:
        self._rank = rank
        self._letters: dict[int, tuple[Letter, Segment, ctypes.c_void_p, ctypes.c_void_p, Tensor]] = {}
        self._sent: set[int] = set()  # messages that were sent at least once
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
        """Copy `x` to the place of the message."""
        letter, other, full, taken, data = self._letters[message]
        if message in self._sent and not take(taken):
            wait_for(taken, self._rank, letter.target, other.pid)
        self._sent.add(message)
        data.view(x.dtype).view(x.shape).copy_(x)
        post(full)

    def receive(self, buffer: Tensor, message: int) -> None:
        """Note the tensor into which `wait` will copy the message."""
        self._buffers[message] = buffer

    def wait(self, message: int) -> None:
        """Wait until the message is in its buffer. A message that this rank sent is done already."""
        buffer = self._buffers.pop(message, None)
        if buffer is None:
            return
        letter, other, full, taken, data = self._letters[message]
        if not take(full):
            wait_for(full, self._rank, letter.source, other.pid)
        assert prod(buffer.shape) * buffer.element_size() == letter.bytes
        buffer.copy_(data.view(buffer.dtype).view(buffer.shape))
        post(taken)
