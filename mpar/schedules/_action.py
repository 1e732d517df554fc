"""Actions: what a rank of a pipeline does with one stage and one microbatch."""

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["KINDS", "Action", "Actions", "num_microbatches", "num_stages"]

KINDS = ("F", "B", "I", "W")


class Action(NamedTuple):
    """Work on one microbatch in one stage. Printed as torch writes it: `2F0`.

    kind: F is a forward, B a backward. A backward may be split into I, which gives the gradient of the stage's input, and W,
    which gives the gradients of its parameters.
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Actions = Sequence[Sequence[Action]]
"""The actions of each rank, in order. All work on a (stage, microbatch) is on the rank that has its F; any rank can have it."""


def num_stages(table: Actions) -> int:
    """The number of stages: one more than the highest that any rank works on."""
    return 1 + max((action.stage for rank in table for action in rank), default=-1)


def num_microbatches(table: Actions) -> int:
    """The number of microbatches: one more than the highest that any rank works on."""
    return 1 + max((action.microbatch for rank in table for action in rank), default=-1)
