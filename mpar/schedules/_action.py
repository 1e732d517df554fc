"""Actions: what a rank of a pipeline does with one stage and one microbatch."""

from collections.abc import Sequence
from typing import NamedTuple

from mpar.errors import ConfigError, brief

__all__ = ["KINDS", "Action", "Actions", "check_table", "num_microbatches", "num_stages"]

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


def check_table(table: object) -> None:
    """Raise ConfigError unless `table` is a list of lists of actions, one for each position."""
    if not isinstance(table, (list, tuple)) or not all(isinstance(row, (list, tuple)) for row in table):
        raise ConfigError(f"the table of a schedule is {brief(table)}: it must be a list of actions for each position along pp")
    strange = next((item for row in table for item in row if not isinstance(item, Action) or item.kind not in KINDS), None)
    if strange is not None:
        raise ConfigError(
            f"the table of a schedule has {strange!r} among its actions: each must be a mpar.schedules.Action of kind F, B, I "
            "or W, such as Action(stage=0, kind='F', microbatch=2). from_table makes them of texts such as 0F2"
        )


def num_stages(table: Actions) -> int:
    """The number of stages: one more than the highest that any rank works on."""
    return 1 + max((action.stage for rank in table for action in rank), default=-1)


def num_microbatches(table: Actions) -> int:
    """The number of microbatches: one more than the highest that any rank works on."""
    return 1 + max((action.microbatch for rank in table for action in rank), default=-1)
