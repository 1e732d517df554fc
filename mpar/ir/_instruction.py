"""Instructions: what a rank does, one after the other. A message joins an instruction of the sender with one of the receiver."""

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["ALL_SLICES", "Instruction", "Member", "Message", "Piece"]

ALL_SLICES = -1
"""The number that stands in the place of a slice and means all slices of the microbatch."""


class Piece(NamedTuple):
    """One slice of one microbatch: what a segment works on at a time. If rows are not cut, it is the whole microbatch."""

    microbatch: int
    slice: int = 0


@dataclass(frozen=True)
class Member:
    """One of the instructions that were joined into one, with the fields that it would have alone."""

    op: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    segment: str
    microbatch: int
    slice: int


@dataclass(frozen=True)
class Instruction:
    """One line of the program: run `outputs = kind(inputs)`, then drop the values in `frees`.

    op:         context, weight, forward, backward, backward_input, backward_weight, gather, reduce, accumulate, offload, fetch,
                send, recv, wait, finish, metrics, results, norm or update.
    segment:    the place in the chain that the instruction belongs to, or "".
    microbatch: the number of the microbatch that it works on; -1: the whole batch.
    slice:      the number of the slice of that microbatch; -1: all its rows, or rows are not cut into slices.
    queue:      where it runs. Instructions of one queue run in order, those of different queues may run at the same time.
    message:    of send, recv and wait: the number of the message, the same for the sender and the receiver.
    peer:       of send, recv and wait: the position along pp of the other side.
    members:    instructions that this one does as one, so that messages inside one hide behind ops of others; else none.

    send and recv only post a message. Until the `wait` of the message, a sent value must not change and a received one may not
    be read.
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
    members: tuple[Member, ...] = ()

    @property
    def alone(self) -> "tuple[Instruction, ...]":
        """The instructions that this one does, all by its kind: its members, or itself."""
        return tuple(
            Instruction(one.op, self.kind, one.inputs, one.outputs, (), one.segment, one.microbatch, slice=one.slice)
            for one in self.members
        ) or (self,)

    @property
    def piece(self) -> Piece | None:
        """The piece of the batch that the instruction, or its first member, works on; None: the whole batch."""
        return None if self.microbatch < 0 else Piece(self.microbatch, max(self.slice, 0))

    @property
    def where(self) -> str:
        """The microbatch and the slice of its rows as text: `mb0`, `mb0.2`, or "" for the whole batch."""
        if self.microbatch < 0:
            return ""
        return f"mb{self.microbatch}" + (f".{self.slice}" if self.slice >= 0 else "")

    @property
    def words(self) -> str:
        """The op, the place in the chain and the piece of the batch as text: `forward layers.3 mb0.2`; of instructions that were
        joined, for each op the first and the last place: `forward layers.0..layers.3 mb0+mb1`."""
        parts = []
        for op in dict.fromkeys(member.op for member in self.members):
            of_op = [member for member in self.alone if member.op == op]
            ends = dict.fromkeys((of_op[0].segment, of_op[-1].segment))
            parts.append(f"{op} {'..'.join(ends)} {'+'.join(dict.fromkeys(member.where for member in of_op))}")
        if parts:
            return " + ".join(parts)
        return " ".join(part for part in (self.op, self.segment, self.where) if part)


@dataclass(frozen=True)
class Message:
    """One message of a step.

    source, target: the positions along pp that send and receive it.
    kind:           F for activations, B for their gradients, G for gradients of parameters that several positions hold.
    """

    number: int
    source: int
    target: int
    kind: str
    bytes: int

    @property
    def channel(self) -> tuple[int, int, str]:
        """(source, target, kind): a channel carries all messages of one kind from one position to another."""
        return self.source, self.target, self.kind
