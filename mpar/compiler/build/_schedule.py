"""Schedule: what a caller may ask of a pipeline: the order in which microbatches pass its stages, and the segments of a stage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mpar.schedules import Action

__all__ = ["Schedule"]


@dataclass(frozen=True)
class Schedule:
    """In which order microbatches pass the stages of a pipeline, and which segments a stage has.

    name:       the name of a schedule in `mpar.schedules`, or `auto`.
    num_chunks: the number of stages at each position along pp; None: the schedule's default.
    layout:     how segments are divided into stages: None (evenly), "balance" (by predicted time), Megatron's letters, or the
                number of layers of each stage.
    options:    further options of the schedule, such as extra_warmup.
    table:      for each position along pp its actions, in place of a named schedule.
    paired:     microbatches go through the stages two at a time, in schedules that go both ways the forward of one beside the
                backward of another; messages inside the segments of one hide behind the other.
    """

    name: str = "one_f_one_b"
    num_chunks: int | None = None
    layout: str | tuple[int, ...] | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    table: Sequence[Sequence[Action]] | None = None
    paired: bool = False

    @property
    def goes_both_ways(self) -> bool:
        """Whether a position does the forward of one microbatch and the backward of another in turn: pairs are then of these."""
        return self.table is None and self.name in ("dual_pipe", "dual_pipe_v")
