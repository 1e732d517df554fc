"""Instructions: what a rank does, one after the other. Messages are what instructions of two ranks have in common."""

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["ALL_SLICES", "Instruction", "Message", "Piece"]

ALL_SLICES = -1
"""In place of a slice: the whole microbatch."""


class Piece(NamedTuple):
    """One slice of the rows of one microbatch: what a segment works on at a time. Without slices it is the whole microbatch."""

    microbatch: int
    slice: int = 0


@dataclass(frozen=True)
class Instruction:
    """One line of the program: `outputs = kind(inputs)`, then the values `frees` are gone.

    op is one of context, weight, forward, backward, backward_input, backward_weight, gather, reduce, accumulate, offload, fetch,
    send, recv, wait, losses, finish, metrics, norm, update. `segment` says where in the chain, `microbatch` which one (-1: all),
    `slice` which part of its rows, where they are cut into several.

    send and recv only post a message, whose number is the same at both ends; `peer` is the other end's position along pp. A sent
    value must not change, and a received one may not be read, until the `wait` of the message.
    """

    op: str
    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    frees: tuple[int, ...] = ()
    segment: str = ""
    microbatch: int = -1
    queue: str = "compute"
    message: int = -1
    peer: int = -1
    slice: int = -1

    @property
    def piece(self) -> Piece | None:
        """The piece of the batch that it works on; None: the whole batch."""
        return None if self.microbatch < 0 else Piece(self.microbatch, max(self.slice, 0))

    @property
    def where(self) -> str:
        """Which microbatch, and which slice of its rows, as text shows it: `mb0`, `mb0.2`, or nothing."""
        if self.microbatch < 0:
            return ""
        return f"mb{self.microbatch}" + (f".{self.slice}" if self.slice >= 0 else "")

    @property
    def words(self) -> str:
        """What it does, where in the chain and to which part of the batch: `forward layers.3 mb0.2`."""
        return " ".join(part for part in (self.op, self.segment, self.where) if part)


@dataclass(frozen=True)
class Message:
    """One message of a step: its number, positions along pp from which and to which, its kind and size."""

    number: int
    source: int
    target: int
    kind: str
    bytes: int

    @property
    def channel(self) -> tuple[int, int, str]:
        """What it travels through."""
        return self.source, self.target, self.kind
