"""Stages: which segments each stage has, what every position along pp does with them, and who holds which parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mpar.errors import ConfigError, ProgramError
from mpar.mesh import Mesh
from mpar.forecast._predict import Hardware, segment_time
from mpar.compiler.segment._compile import Slices
from mpar.compiler.segment._split import split_segment
from mpar.schedules import Action, Costs, Transfer, actions, auto_actions, lower, num_stages, stage_ranges, timeline, verify
from mpar.schedules import num_microbatches as count_microbatches

__all__ = ["Pipeline", "Schedule", "make_pipeline"]


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
    options: Mapping[str, Any] = field(default_factory=dict)
    table: Sequence[Sequence[Action]] | None = None


@dataclass(frozen=True)
class Pipeline:
    """ranges: per stage its segments. table: per position its actions. steps: the same with messages between them."""

    ranges: tuple[range, ...]
    table: list[list[Action]]
    steps: list[list[Action | Transfer]]

    @cached_property
    def positions(self) -> dict[int, tuple[int, ...]]:
        """For each stage the positions along pp that hold a copy of it, in the order in which its gradients are added."""
        first: dict[int, dict[int, int]] = {}  # stage -> position -> its first microbatch there
        for position, own in enumerate(self.table):
            for action in own:
                copies = first.setdefault(action.stage, {})
                copies[position] = min(copies.get(position, action.microbatch), action.microbatch)
        return {stage: tuple(sorted(copies, key=copies.__getitem__)) for stage, copies in first.items()}

    def stages_at(self, position: int) -> list[int]:
        """The stages of which a position holds a copy, ascending."""
        return sorted({action.stage for action in self.table[position]})

    def stage_of(self, segment: int) -> int:
        """The stage that a segment belongs to."""
        return next(stage for stage, own in enumerate(self.ranges) if segment in own)

    def uses(self, users: Sequence[int]) -> list[tuple[int, int, int]]:
        """(segment, copy, position) of every use of a unit that the segments `users` read, in the order of addition."""
        return [(index, copy, at) for index in users for copy, at in enumerate(self.positions[self.stage_of(index)])]


Context = tuple[Sequence[str], Sequence[Slices], Mesh, Hardware]
"""Names and code of the segments, on which mesh, and whose costs count."""


def make_pipeline(
    schedule: Schedule,
    mesh: Mesh,
    num_microbatches: int,
    names: Sequence[str],
    codes: Sequence[Slices],
    hardware: Hardware,
    *,
    backward: bool = True,
) -> Pipeline:
    """Stages and their order, without `backward` of forwards alone.

    Raises ConfigError if the schedule cannot run on the ranks of pp.
    """
    context = (names, codes, mesh, hardware)
    num_positions = mesh.axis_size("pp")
    candidates, refused = [], []
    for table in _tables(schedule, num_positions, num_microbatches, context):
        ranges = _ranges(schedule, num_stages(table), context)
        costs = stage_costs(ranges, codes, mesh, hardware, split=any(action.kind == "I" for own in table for action in own))
        try:
            candidates.append((timeline(table, costs).makespan, ranges, table, costs))
        except ProgramError as error:
            refused.append(str(error))
    if not candidates:
        raise ConfigError(f"the table of the schedule cannot be run: {'; '.join(refused)}")
    _, ranges, table, costs = min(candidates, key=lambda candidate: candidate[0])
    if not backward:
        table = [[action for action in own if action.kind == "F"] for own in table]
    elif not any(action.kind in "BW" for own in table for action in own):
        raise ConfigError(f"cannot train by schedule {schedule.name!r}: it has forwards only; compile_eval runs those")
    steps = lower(table, costs)
    verify(steps)
    table = [[item for item in own if isinstance(item, Action)] for own in steps]  # some I and W have become B
    return Pipeline(ranges, table, steps)


def _tables(schedule: Schedule, num_positions: int, num_microbatches: int, context: Context) -> list[list[list[Action]]]:
    """The orders to choose from: one, but for `auto`."""
    if schedule.table is not None:
        return [_given(schedule, num_positions, num_microbatches)]
    if schedule.name == "auto":
        return _found(schedule, num_positions, num_microbatches, context)
    sizes: dict[str, Any] = {"num_ranks": num_positions, "num_chunks": schedule.num_chunks, "num_microbatches": num_microbatches}
    return [actions(schedule.name, **sizes, **schedule.options)]


def _given(schedule: Schedule, num_positions: int, num_microbatches: int) -> list[list[Action]]:
    assert schedule.table is not None
    table = [list(own) for own in schedule.table]
    wrong = []
    if len(table) != num_positions:
        wrong.append(f"it has {len(table)} ranks, which does not fit mesh axis pp={num_positions}")
    if (count := count_microbatches(table)) != num_microbatches:
        wrong.append(f"it has {count} microbatches, which does not fit num_microbatches={num_microbatches}")
    if schedule.num_chunks is not None or schedule.options:
        wrong.append("it says all by itself: num_chunks and options belong to schedules by name")
    if wrong:
        raise ConfigError("cannot use this table of a schedule: " + "; ".join(wrong))
    return table


def _found(schedule: Schedule, num_positions: int, num_microbatches: int, context: Context) -> list[list[list[Action]]]:
    """What `auto` finds for each placement that the schedule leaves open: one or two stages a rank, in a loop or a V."""
    unknown = sorted(set(schedule.options) - {"placement", "cap_bytes"})
    wanted = schedule.options.get("placement")
    if unknown or wanted not in (None, "loop", "v"):
        raise ConfigError(
            f"schedule auto: its options are placement (loop or v) and cap_bytes; here they are {dict(schedule.options)}"
        )
    numbers = (1, 2) if schedule.num_chunks is None else (schedule.num_chunks,)
    choices = [(n, p) for n in numbers for p in ("loop", "v") if (n > 1 or p == "loop") and wanted in (None, p)]
    tables, refused = [], [] if choices else [f"{numbers} stages a rank in placement {wanted}: a V needs two"]
    for chunks, placement in choices:
        try:
            ranges = _ranges(schedule, chunks * num_positions, context)
            tables.append(
                auto_actions(
                    num_ranks=num_positions,
                    num_chunks=chunks,
                    num_microbatches=num_microbatches,
                    costs=stage_costs(ranges, *context[1:], split=True),
                    placement=placement,
                    cap_bytes=schedule.options.get("cap_bytes"),
                )
            )
        except ConfigError as error:
            refused.append(f"{chunks} stages a rank in placement {placement}: {error}")
    if not tables:
        raise ConfigError("schedule auto finds no order:\n  " + "\n  ".join(refused))
    return tables


def _ranges(schedule: Schedule, stages: int, context: Context) -> tuple[range, ...]:
    names, codes, mesh, hardware = context
    whole = None
    if schedule.layout == "balance":
        whole = [
            sum(segment_time(half.kind, mesh, hardware) for code in own for half in (code.forward, code.backward))
            for own in codes
        ]
    return stage_ranges(names, stages, schedule.layout, costs=whole)


def stage_costs(ranges: Sequence[range], codes: Sequence[Slices], mesh: Mesh, hardware: Hardware, *, split: bool) -> Costs:
    """Predicted costs of stages. Without `split` nothing runs I or W, which are not compiled then: halves stand for them.

    The first stage's backward is all W: nobody waits for the gradient of its input. What gives losses only is done whole then.
    """
    forward, whole, first, second, held, left, sent = [], [], [], [], [], [], []
    for own in ranges:
        slices = [code for i in own for code in codes[i]]
        before = [code.forward for code in slices if split or code.whole is None]
        after = [code.backward if split else code.whole or code.backward for code in slices]
        forward.append(sum(segment_time(code.kind, mesh, hardware) for code in before))
        whole.append(sum(segment_time(code.kind, mesh, hardware) for code in after))
        held.append(sum(_bytes(code.out_values) for code in before))
        deferred = own.start == 0
        halves = [split_segment(code) for code in slices] if split and not deferred else []
        first.append(sum(segment_time(half.input.kind, mesh, hardware) for half in halves) if split else whole[-1] / 2)
        second.append(sum(segment_time(half.weight.kind, mesh, hardware) for half in halves) if split else whole[-1] / 2)
        if deferred:
            first[-1], second[-1] = 0.0, whole[-1]
        left.append(held[-1] if not halves else sum(_bytes(half.weight.in_values) for half in halves))
        x = [value for code in codes[own[-1]] for value in code.traced.x_out] if len(own) else []
        sent.append(hardware.link_latency_s + _bytes(x) / hardware.link_bytes_per_s)
    return Costs(
        forward,
        first,
        second,
        backward=whole,
        transfer=sent[:-1],
        activation=held,
        weight_part=[min(a, b) for a, b in zip(left, held, strict=True)],
    )


def _bytes(values: Sequence[Any]) -> int:
    return sum(value.nbytes for value in values)
