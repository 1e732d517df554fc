"""Phases: writes an order as groups of actions that repeat, each time with the next microbatch of that stage and kind."""

from collections.abc import Sequence
from itertools import count

from mpar.schedules._action import Action

__all__ = ["Phases"]


class Phases:
    """The order of a rank that has these stages, built phase by phase."""

    def __init__(self, stages: Sequence[int]) -> None:
        self._order: list[tuple[int, str, int]] = []
        self._next = {(stage, kind): count() for stage in stages for kind in "FIW"}

    def emit(self, times: int, *keys: tuple[int, str]) -> None:
        """Add a phase: the actions `keys`, as (stage, kind), `times` times."""
        for _ in range(times):
            for key in keys:
                self._order.append((*key, next(self._next[key])))

    def actions(self, num_microbatches: int) -> tuple[Action, ...]:
        """The order, without actions of microbatches from `num_microbatches` on."""
        return tuple([tuple.__new__(Action, entry) for entry in self._order if entry[2] < num_microbatches])
