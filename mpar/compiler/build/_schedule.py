"""Schedule: what a caller may ask of a pipeline: the order in which microbatches pass its stages, and the segments of a stage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mpar.schedules import Action, check_table

__all__ = ["Schedule"]

_BOTH_WAYS: dict[str, dict[str, object]] = {
    "dual_pipe": {},
    "dual_pipe_v": {},
    "interleaved": {"forwards_ahead": 1},
    "one_f_one_b": {"extra_warmup": 1, "forwards_ahead": 1},
}
"""Schedules that do forwards and backwards in turn, and their options for which these are of different microbatches."""


@dataclass(frozen=True)
class Schedule:
    """In which order microbatches pass the stages of a pipeline, and which segments a stage has.

    name:       the name of a schedule in `mpar.schedules`, or `auto`.
    num_chunks: the number of stages at each position along pp; None: the schedule's default.
    layout:     how segments are divided into stages: None (evenly), "balance" (by predicted time), Megatron's letters, or the
                number of layers of each stage.
    options:    further options of the schedule, such as extra_warmup.
    table:      for each position along pp its actions, in place of a named schedule.
    paired:     in a pipeline, 1F1B, interleaved or not, dual_pipe and dual_pipe_v do the forward of one microbatch beside the
                backward of another; elsewhere microbatches go through the stages two at a time. Messages inside the segments of
                one hide behind the other.
    """

    name: str = "one_f_one_b"
    num_chunks: int | None = None
    layout: str | tuple[int, ...] | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    table: Sequence[Sequence[Action]] | None = None
    paired: bool = False

    def __post_init__(self) -> None:
        if self.table is not None:
            check_table(self.table)

    def pairs_both_ways(self, num_positions: int) -> bool:
        """Whether pairs are a forward and a backward, of two microbatches, at so many positions along pp."""
        named = self.table is None and self.name in _BOTH_WAYS
        return self.paired and named and (num_positions > 1 or self.name != "one_f_one_b")

    def for_positions(self, num_positions: int) -> "Schedule":
        """The same with the options that pairs need at so many positions along pp, unless they are given."""
        return replace(self, options={**_BOTH_WAYS[self.name], **self.options}) if self.pairs_both_ways(num_positions) else self
