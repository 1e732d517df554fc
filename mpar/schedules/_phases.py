"""Phases: an order written down as actions that repeat, each of which goes on with its own next microbatch."""

from collections.abc import Sequence
from itertools import count

from mpar.schedules._action import Action

__all__ = ["Phases"]


class Phases:
    """The order of a rank with these stages, phase by phase."""

    def __init__(self, stages: Sequence[int]) -> None:
        self._order: list[tuple[int, str, int]] = []
        self._next = {(stage, kind): count() for stage in stages for kind in "FIW"}

    def emit(self, times: int, *what: tuple[int, str]) -> None:
        """Add a phase: `times` rounds of these (stage, kind)."""
        for _ in range(times):
            for key in what:
                self._order.append((*key, next(self._next[key])))

    def actions(self, num_microbatches: int) -> tuple[Action, ...]:
        """The order, without microbatches that do not exist."""
        return tuple([tuple.__new__(Action, entry) for entry in self._order if entry[2] < num_microbatches])
