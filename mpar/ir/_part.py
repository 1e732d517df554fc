"""Parts: the instructions of the ranks at one position along pp, and what goes in and comes out."""

from collections.abc import Iterator
from dataclasses import dataclass

from mpar.ir._instruction import Instruction, Piece
from mpar.ir._values import Leaf

__all__ = ["Contribution", "Part", "SegmentResult"]


@dataclass(frozen=True)
class Contribution:
    """A gradient as a backward gives it: of the parameter at `path`, by `use`, a segment (with a ' for each further copy of its
    stage), for one piece of the batch."""

    path: str
    use: str
    piece: Piece


@dataclass(frozen=True)
class SegmentResult:
    """The result number `index` of those of one sort, such as losses, that a segment gives for a piece of the batch."""

    segment: str
    piece: Piece
    index: int


@dataclass
class Part:
    """What all ranks at one position along pp do.

    state_in / state_out: parameters then optimizer slots, by path, before and after the step; batch: by (key, piece).
    scalars:              values given by the host each step: lr, step.
    contributions:        values that backward segments give as gradients.
    losses:               values that they give as losses, where forward and backward are one.
    carried:              values of a slice that later slices of its rows read.
    gradients:            the finished gradient of each parameter, by path.
    """

    instructions: list[Instruction]
    state_in: list[Leaf]
    state_out: list[Leaf]
    batch: list[Leaf]
    scalars: list[Leaf]
    metrics: list[Leaf]
    contributions: dict[int, Contribution]
    losses: dict[int, SegmentResult]
    carried: dict[int, SegmentResult]
    gradients: dict[str, int]

    def reads(self) -> Iterator[Leaf]:
        """Everything that is there before the first instruction."""
        yield from self.state_in
        yield from self.batch
        yield from self.scalars
