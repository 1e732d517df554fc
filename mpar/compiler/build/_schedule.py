"""Schedule: how microbatches go through the stages of a pipeline, as a caller asks for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mpar.schedules import Action

__all__ = ["Schedule"]


@dataclass(frozen=True)
class Schedule:
    """How microbatches go through the stages of a pipeline.

    name:       a schedule of `mpar.schedules`, `auto` among them; with one stage they are all the same.
    num_chunks: stages of each rank; None: as many as the schedule has by default.
    layout:     which segments make up a stage: None (even), "balance", Megatron's letters, or layers of each stage.
    options:    of the schedule, such as extra_warmup.
    table:      actions of every rank, instead of a name.
    """

    name: str = "one_f_one_b"
    num_chunks: int | None = None
    layout: str | tuple[int, ...] | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    table: Sequence[Sequence[Action]] | None = None
