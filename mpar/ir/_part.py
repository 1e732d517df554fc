"""Parts: the instructions of the ranks at one position along pp, with their inputs and results."""

from collections.abc import Iterator
from dataclasses import dataclass

from mpar.ir._instruction import Instruction, Piece
from mpar.ir._values import Leaf

__all__ = ["STATE", "Contribution", "Part", "SegmentResult"]

STATE = "state."
"""What the paths of state that segments keep from step to step begin with; others begin with `params.` or `opt.`."""


@dataclass(frozen=True)
class Contribution:
    """What one value of a backward is: the gradient of the parameter at `path` that the segment `use` gives for one piece of the
    batch. If several positions hold copies of the segment's stage, `use` has a ' for each copy before this one."""

    path: str
    use: str
    piece: Piece


@dataclass(frozen=True)
class SegmentResult:
    """What one value of a segment is: for one piece of the batch, result number `index` of one sort, such as losses."""

    segment: str
    piece: Piece
    index: int


@dataclass
class Part:
    """What all ranks at one position along pp do.

    state_in / state_out: the parameters, then the slots of the optimizer, then the state of segments, before and after the step.
    batch:                the entries of the batch, one leaf for each key and piece.
    scalars:              the values that the host gives for each step: the learning rate `lr`, the number `step` of the update,
                          and `max_loss` and `max_grad_norm`, the largest with which the update is made.
    metrics:              the values that the step reports.
    contributions:        by value, which gradient it is, for all gradients that backwards give.
    reports:              by value, which loss or metric it is, losses first, for those of segments whose forward and backward are
                          one instruction.
    carried:              by value, which result it is, for all values that a slice hands to later slices of its rows.
    gradients:            by path of the parameter, the value that is its finished gradient.
    """

    instructions: list[Instruction]
    state_in: list[Leaf]
    state_out: list[Leaf]
    batch: list[Leaf]
    scalars: list[Leaf]
    metrics: list[Leaf]
    contributions: dict[int, Contribution]
    reports: dict[int, SegmentResult]
    carried: dict[int, SegmentResult]
    gradients: dict[str, int]

    def reads(self) -> Iterator[Leaf]:
        """The leaves whose values exist before the first instruction."""
        yield from self.state_in
        yield from self.batch
        yield from self.scalars
