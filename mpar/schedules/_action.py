"""Actions: what a rank of a pipeline does, one stage and one microbatch at a time."""

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["KINDS", "Action", "Actions", "num_microbatches", "num_stages"]

KINDS = ("F", "B", "I", "W")


class Action(NamedTuple):
    """Work on one microbatch in one stage; printed as torch writes it: `2F0`.

    kind: F forward, B whole backward, I the part of it that gives the gradient of the stage's input, W the rest: gradients of
    parameters.
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Actions = Sequence[Sequence[Action]]
"""Per rank, in order. (stage, microbatch) lives on the rank that has its F: any map from stages to ranks is possible."""


def num_stages(table: Actions) -> int:
    """Stages of the model: the highest that any rank works on, and one."""
    return 1 + max((action.stage for rank in table for action in rank), default=-1)


def num_microbatches(table: Actions) -> int:
    """Microbatches: the highest that any rank works on, and one."""
    return 1 + max((action.microbatch for rank in table for action in rank), default=-1)
