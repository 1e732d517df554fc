"""Pipeline: which segments each stage has, what every position along pp does with them, and which positions hold a stage."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeGuard

from mpar.chain import Chain
from mpar.compiler.build._options import CompileOptions
from mpar.compiler.build._placement import Placement
from mpar.compiler.build._schedule import Schedule
from mpar.compiler.build._stage_costs import StageCosts
from mpar.errors import ConfigError, ProgramError
from mpar.schedules import Action, Transfer, actions, auto_actions, lower, num_stages, stage_ranges, timeline, verify
from mpar.schedules import num_microbatches as count_microbatches

__all__ = ["Pipeline", "make_pipeline", "pairs_of"]


@dataclass(frozen=True)
class Pipeline:
    """The stages of a model and the schedule that runs them.

    ranges:  for each stage its segments.
    table:   for each position along pp its actions, in order.
    entries: the same with the transfers between stages among the actions.
    """

    ranges: tuple[range, ...]
    table: list[list[Action]]
    entries: list[list[Action | Transfer]]

    @cached_property
    def positions(self) -> dict[int, tuple[int, ...]]:
        """For each stage the positions along pp that hold a copy of it, in the order in which its gradients are added."""
        first: dict[int, dict[int, int]] = {}  # stage -> position -> its first microbatch there
        for position, row in enumerate(self.table):
            for action in row:
                copies = first.setdefault(action.stage, {})
                copies[position] = min(copies.get(position, action.microbatch), action.microbatch)
        return {stage: tuple(sorted(copies, key=copies.__getitem__)) for stage, copies in first.items()}

    def stages_at(self, position: int) -> list[int]:
        """The stages of which a position holds a copy, ascending."""
        return sorted({action.stage for action in self.table[position]})

    def stage_of(self, segment: int) -> int:
        """The stage that a segment belongs to."""
        return next(stage for stage, segments in enumerate(self.ranges) if segment in segments)

    def uses(self, users: Sequence[int]) -> list[tuple[int, int, int]]:
        """(segment, copy, position) of every use of a unit that the segments `users` read, in the order of adding gradients."""
        return [(index, copy, position) for index in users for copy, position in enumerate(self.positions[self.stage_of(index)])]


@dataclass(frozen=True)
class _Request:
    """A schedule that is asked for. names: those of the segments, in order; costs: the predicted costs of stages."""

    schedule: Schedule
    num_positions: int
    num_microbatches: int
    names: Sequence[str]
    costs: StageCosts

    def ranges(self, num_stages: int) -> tuple[range, ...]:
        """For each stage its segments, as the layout divides them."""
        seconds = self.costs.segment_seconds() if self.schedule.layout == "balance" else None
        return stage_ranges(self.names, num_stages, self.schedule.layout, costs=seconds)


def make_pipeline(model: Chain, placement: Placement, options: CompileOptions) -> Pipeline:
    """Divide the segments into stages and find the schedule; of several candidates the one with the least predicted time.

    Without training, the schedule keeps its forwards only. Raises ConfigError if it cannot run on the positions along pp.
    """
    names = [segment.name for segment in model.segments]
    costs = StageCosts(placement.segments, placement.mesh, options.profile)
    num_positions = placement.mesh.axis_size("pp")
    schedule = options.schedule.for_positions(num_positions)
    both_ways = schedule.pairs_both_ways(num_positions)
    num_turns = _num_turns(options, both_ways=both_ways)
    request = _Request(schedule, num_positions, num_turns, names, costs)
    candidates, refused = [], []
    for table in _tables(request):
        ranges = request.ranges(num_stages(table))
        stage_costs = costs.of(ranges, split=any(action.kind == "I" for row in table for action in row))
        try:
            candidates.append((timeline(table, stage_costs).makespan, ranges, table, stage_costs))
        except ProgramError as error:
            refused.append(str(error))
    if not candidates:
        raise ConfigError(f"the table of the schedule cannot be run: {'; '.join(refused)}")
    _, ranges, table, stage_costs = min(candidates, key=lambda candidate: candidate[0])
    if not options.training:
        table = [[action for action in row if action.kind == "F"] for row in table]
    elif not any(action.kind in "BW" for row in table for action in row):
        raise ConfigError(
            f"cannot train by schedule {options.schedule.name!r}: it has forwards only; compile_eval runs those"
        )
    entries = lower(table, stage_costs)
    if both_ways:
        entries = [_forwards_beside_backwards(items) for items in entries]
    elif schedule.paired:
        entries = [[both for item in items for both in _both(item)] for items in entries]
    verify(entries)
    entries = _with_gradients(entries, ranges, placement)
    table = [[item for item in row if isinstance(item, Action)] for row in entries]  # some I and W have become B
    return Pipeline(ranges, table, entries)


def _with_gradients(
    entries: Sequence[Sequence[Action | Transfer]], ranges: Sequence[range], placement: Placement
) -> list[list[Action | Transfer]]:
    """The entries without the backwards of stages that have none, and without messages of gradients that do not exist: before
    the first parameter that is trained nothing has a gradient."""
    codes = placement.segments
    returns = [codes.returns_gradients(segments) for segments in ranges]
    has_backward = [sends or any(map(codes.has_backward, of)) for sends, of in zip(returns, ranges, strict=True)]
    sent = {item.message for items in entries for item in items if _is_send(item) and (item.kind == "F" or returns[item.stage])}
    return [
        [
            item
            for item in items
            if (item.message in sent if isinstance(item, Transfer) else item.kind == "F" or has_backward[item.stage])
        ]
        for items in entries
    ]


def _is_send(item: Action | Transfer) -> TypeGuard[Transfer]:
    return isinstance(item, Transfer) and item.op == "send"


def _num_turns(options: CompileOptions, *, both_ways: bool) -> int:
    """How often each stage has its turn: for each microbatch, or for each pair of them. Raises ConfigError for an odd number."""
    number = options.num_microbatches
    if options.schedule.paired and options.num_slices > 1:
        raise ConfigError(
            f"cannot take microbatches two at a time whose rows are cut into {options.num_slices} slices.\n"
            "Use num_slices=1 or paired=False (schedule.num_slices and schedule.paired in a configuration)."
        )
    if not options.schedule.paired or both_ways:
        return number
    if number % 2:
        raise ConfigError(
            f"cannot take {number} microbatches two at a time.\n"
            "Use an even num_microbatches (schedule.num_microbatches in a configuration), or paired=False."
        )
    return number // 2


def _both(item: Action | Transfer) -> list[Action | Transfer]:
    """The same for both microbatches of the pair that `item` counts as one."""
    numbers = (2 * item.microbatch, 2 * item.microbatch + 1)
    if isinstance(item, Action):
        return [item._replace(microbatch=m) for m in numbers]
    return [item._replace(microbatch=m, message=2 * item.message + i) for i, m in enumerate(numbers)]


def pairs_of(actions: Sequence[Action]) -> set[tuple[Action, Action]]:
    """The forwards and backwards of a position that run together: those in a row, of two microbatches.

    There are none where all forwards come before all backwards: the last forward does not wait for the first backward there,
    since the position behind may need that forward before it can do that backward.
    """
    first = next((place for place, action in enumerate(actions) if action.kind == "B"), len(actions))
    if not any(action.kind == "F" for action in actions[first:]):
        return set()
    rows = itertools.pairwise(actions)
    return {(a, b) for a, b in rows if a.kind == "F" and b.kind == "B" and a.microbatch != b.microbatch}


def _forwards_beside_backwards(items: Sequence[Action | Transfer]) -> list[Action | Transfer]:
    """What a position does, where each forward before a backward of another microbatch waits for what that backward needs.

    Receipts between the two, and waits for them, go in front of the forward, and sends behind the backward.
    """
    beside = pairs_of([item for item in items if isinstance(item, Action)])
    received = {item.message for item in items if isinstance(item, Transfer) and item.op == "recv"}
    out: list[Action | Transfer] = []
    between: list[Transfer] = []
    forward: Action | None = None
    for item in items:
        if isinstance(item, Transfer):
            (out if forward is None else between).append(item)
            continue
        pairs = forward is not None and (forward, item) in beside
        early = [transfer for transfer in between if pairs and transfer.message in received]
        late = [transfer for transfer in between if transfer not in early]
        out += [*early, *([forward] if forward else []), *([] if pairs else late)]
        between, forward = [], item if item.kind == "F" else None
        if forward is None:
            out += [item, *(late if pairs else [])]
    return [*out, *([forward] if forward else []), *between]


def _tables(request: _Request) -> list[list[list[Action]]]:
    """The schedules to choose from, each as actions by position: one, except for `auto`."""
    schedule = request.schedule
    if schedule.table is not None:
        return [_table_as_given(schedule, request.num_positions, request.num_microbatches)]
    if schedule.name == "auto":
        return _auto_tables(request)
    return [
        actions(
            schedule.name,
            num_ranks=request.num_positions,
            num_chunks=schedule.num_chunks,
            num_microbatches=request.num_microbatches,
            **schedule.options,
        )
    ]


def _table_as_given(schedule: Schedule, num_positions: int, num_microbatches: int) -> list[list[Action]]:
    """The actions that the caller gave; raises ConfigError unless they fit the mesh and the microbatches."""
    assert schedule.table is not None
    table = [list(row) for row in schedule.table]
    wrong = []
    if len(table) != num_positions:
        wrong.append(f"it has {len(table)} ranks, which does not fit mesh axis pp={num_positions}")
    if (count := count_microbatches(table)) != num_microbatches:
        wanted = f"num_microbatches={num_microbatches}"
        if schedule.paired:
            wanted = f"the {num_microbatches} pairs of microbatches that paired=True makes: each of its numbers is a pair"
        wrong.append(f"it has {count} microbatches, which does not fit {wanted}")
    if schedule.num_chunks is not None or schedule.options:
        wrong.append("num_chunks and options cannot be given with it: they belong to schedules by name")
    if wrong:
        raise ConfigError("cannot use the table that the schedule gives: " + "; ".join(wrong))
    return table


def _auto_tables(request: _Request) -> list[list[list[Action]]]:
    """The orders that `auto` finds, one for each way to place stages that the schedule allows.

    A position has `num_chunks` stages, or one or two if the schedule leaves that open. They are placed in a loop or in a V.
    """
    schedule = request.schedule
    unknown = sorted(set(schedule.options) - {"placement", "cap_bytes"})
    wanted, cap_bytes = schedule.options.get("placement"), schedule.options.get("cap_bytes")
    if unknown or wanted not in (None, "loop", "v") or not (cap_bytes is None or isinstance(cap_bytes, (int, Sequence))):
        raise ConfigError(
            f"schedule auto takes the options placement (loop or v) and cap_bytes; it was given {dict(schedule.options)}"
        )
    if schedule.paired and cap_bytes is not None:  # costs are those of one microbatch
        cap_bytes = cap_bytes // 2 if isinstance(cap_bytes, int) else [cap // 2 for cap in cap_bytes]
    numbers = (1, 2) if schedule.num_chunks is None else (schedule.num_chunks,)
    placements = [(n, p) for n in numbers for p in ("loop", "v") if (n > 1 or p == "loop") and wanted in (None, p)]
    tables, refused = [], [] if placements else [f"num_chunks={schedule.num_chunks} in placement v: a V needs two stages a rank"]
    for chunks, placement in placements:
        try:
            tables.append(
                auto_actions(
                    num_ranks=request.num_positions,
                    num_chunks=chunks,
                    num_microbatches=request.num_microbatches,
                    costs=request.costs.of(request.ranges(chunks * request.num_positions), split=True),
                    placement=placement,
                    cap_bytes=cap_bytes,
                )
            )
        except ConfigError as error:
            refused.append(f"{chunks} stages a rank in placement {placement}: {error}")
    if not tables:
        raise ConfigError("schedule auto finds no order:\n  " + "\n  ".join(refused))
    return tables
