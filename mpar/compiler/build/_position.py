"""Position: what the ranks at one position along pp hold and do, before any instruction is written."""

import functools
import itertools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from mpar.compiler.build._blueprint import Blueprint
from mpar.compiler.build._pipeline import pairs_of
from mpar.compiler.build._units import Unit, group_units
from mpar.compiler.segment import SegmentCode, split_segment
from mpar.schedules import Action, Transfer

__all__ = ["Position", "Turn", "Use"]

T = TypeVar("T")
"""What lists hold."""


class Turn(NamedTuple):
    """One action for one microbatch, or for two that go through the stages together."""

    stage: int
    kind: str
    microbatches: tuple[int, ...]


def _in_turn(lists: Sequence[Sequence[T]]) -> list[T]:
    """The first of each list, then the second of each, and so on."""
    return [item for items in itertools.zip_longest(*lists) for item in items if item is not None]


@dataclass(frozen=True)
class Use:
    """One run of a segment: the number of its round among those of the position, its stage, the paths of the units it reads."""

    round: int
    stage: int
    paths: frozenset[str]


@dataclass(frozen=True)
class Position:
    """One position along pp; `number` is the coordinate."""

    blueprint: Blueprint
    number: int

    @functools.cached_property
    def actions(self) -> list[Action]:
        """The actions of this position, in order."""
        return self.blueprint.pipeline.table[self.number]

    @functools.cached_property
    def entries(self) -> list[tuple[Turn, ...] | Transfer]:
        """The rounds of this position, in order, with the transfers between stages among them. A round is a turn, or a forward
        and a backward that run together."""
        schedule = self.blueprint.options.schedule
        both_ways = schedule.pairs_both_ways(self.blueprint.placement.mesh.axis_size("pp"))
        beside = pairs_of(self.actions) if both_ways else set()
        out: list[tuple[Turn, ...] | Transfer] = []
        before: Action | None = None
        for item in self.blueprint.pipeline.entries[self.number]:
            if isinstance(item, Transfer):
                out.append(item)
                before = None
                continue
            turn = (Turn(item.stage, item.kind, (item.microbatch,)),)
            if before is not None and (before, item) in beside:
                out[-1] = (Turn(before.stage, before.kind, (before.microbatch,)), *turn)
            elif schedule.paired and not both_ways and item.microbatch % 2:
                out[-1] = (Turn(item.stage, item.kind, (item.microbatch - 1, item.microbatch)),)
            else:
                out.append(turn)
            before = item
        return out

    @functools.cached_property
    def stages(self) -> list[int]:
        """The stages of which this position holds a copy, ascending."""
        return self.blueprint.pipeline.stages_at(self.number)

    @functools.cached_property
    def copies(self) -> dict[int, int]:
        """For each stage here, the number of the copy that this position holds."""
        return {stage: self.blueprint.pipeline.positions[stage].index(self.number) for stage in self.stages}

    @functools.cached_property
    def units(self) -> dict[str, Unit]:
        """The units that the segments of this position read, by path."""
        held = {segment for stage in self.stages for segment in self.blueprint.pipeline.ranges[stage]}
        return {path: unit for path, unit in self.blueprint.placement.units.items() if held & set(unit.users)}

    @functools.cached_property
    def trained_units(self) -> dict[str, Unit]:
        """These units, each with only those of its parameters that are trained; none without such."""
        return {path: unit for path, unit in self.blueprint.trained_units.items() if path in self.units}

    @functools.cached_property
    def groups(self) -> dict[int, list[list[Unit]]]:
        """For each stage, the groups of units that its segments read."""
        return {stage: self._groups(self.blueprint.pipeline.ranges[stage], self.units) for stage in self.stages}

    @functools.cached_property
    def trained_groups(self) -> dict[int, list[list[Unit]]]:
        """For each stage, the groups of units whose gradients are reduced together."""
        return {stage: self._groups(self.blueprint.pipeline.ranges[stage], self.trained_units) for stage in self.stages}

    def _groups(self, segments: range, units: Mapping[str, Unit]) -> list[list[Unit]]:
        """The groups of those `units` that the segments of one stage read; the users of each unit are those of this stage."""
        read: dict[str, Unit] = {}
        for index in segments:
            for path in self.blueprint.segments[index].paths:
                if path in units:
                    users = [user for user in units[path].users if user in segments]
                    read.setdefault(path, replace(units[path], users=users))
        return group_units(list(read.values()), self.blueprint.options.bucket_bytes)

    @functools.cached_property
    def last_microbatches(self) -> dict[int, int]:
        """For each stage, the microbatch whose gradients come last."""
        return {action.stage: action.microbatch for action in self.actions if action.kind in "BW"}

    @functools.cached_property
    def _forwards(self) -> frozenset[Action]:
        return frozenset(action for action in self.actions if action.kind == "F")

    @functools.cached_property
    def _undivided(self) -> frozenset[tuple[int, int]]:
        """The (stage, microbatch) pairs whose backward is not split into I and W."""
        return frozenset(
            (stage, m)
            for stage, kind, m in self.actions
            if kind == "B" or (kind == "W" and not self.returns_gradients(stage))
        )

    def returns_gradients(self, stage: int) -> bool:
        """Whether a stage gives gradients of what enters it. If not, its I does nothing, and its W the whole backward."""
        return self.blueprint.placement.segments.returns_gradients(self.blueprint.pipeline.ranges[stage])

    def runs(self, stage: int, microbatch: int) -> bool:
        """Whether this position runs the stage with that microbatch; then values go to or from the stage without a message."""
        return Action(stage, "F", microbatch) in self._forwards

    def is_joint(self, segment: int, stage: int, microbatch: int) -> bool:
        """Whether a segment's forward and backward are one instruction: it returns losses only, and its backward is not split."""
        is_possible = all(code.joint is not None for code in self.blueprint.codes[segment])
        return is_possible and (stage, microbatch) in self._undivided

    def holders(self, unit: Unit) -> list[int]:
        """The positions along pp that hold a unit, in the order of its uses."""
        return list(dict.fromkeys(position for _, _, position in self.blueprint.pipeline.uses(unit.users)))

    def uses(self) -> list[Use]:
        """Every run of a segment at this position, in order."""
        rounds = (item for item in self.entries if not isinstance(item, Transfer))
        return [use for number, turns in enumerate(rounds) for use in _in_turn([self._uses(number, turn) for turn in turns])]

    def _uses(self, number: int, turn: Turn) -> list[Use]:
        """The runs of segments of one turn, which is one of those of round `number`."""
        uses = []
        segments = self.blueprint.pipeline.ranges[turn.stage]
        for index in segments if turn.kind == "F" else reversed(segments):
            actions = [Action(turn.stage, turn.kind, m) for m in turn.microbatches]
            reads = [self._parameters_read(index, action) for action in actions]
            read = [some for some in reads if some is not None]
            if read:
                paths = self._paths_read(self.blueprint.segments[index].paths, set().union(*read))
                uses.append(Use(number, turn.stage, frozenset(paths)))
        return uses

    def _parameters_read(self, segment: int, action: Action) -> Set[int] | None:
        """Which parameters a segment reads in an action of its stage, as indices into its primals (parameters, x, context).

        Indices of x and of the context may be among them. None means that the action does not run the segment.
        """
        codes: Sequence[SegmentCode] = self.blueprint.codes[segment]
        joint = self.is_joint(segment, action.stage, action.microbatch)
        divided = self.returns_gradients(action.stage)
        if (joint and action.kind == "F") or (action.kind == "I" and (joint or not divided)):
            return None
        if joint or action.kind == "F":
            return set(range(codes[0].traced.num_params))
        if not self.blueprint.placement.segments.has_backward(segment):
            return None
        if action.kind == "B" or not divided:
            return {i for code in codes for i in code.reads}
        if action.kind == "W" and not codes[0].traced.trained:
            return None
        halves = [split_segment(code) for code in codes if code.backward is not None]
        return {i for half in halves for i in (half.input_reads if action.kind == "I" else half.weight_reads)}

    def _paths_read(self, paths: Sequence[str], reads: Set[int]) -> list[str]:
        """Those of a segment's `paths` with at least one parameter among the primals `reads`."""
        out, start = [], 0
        for path in paths:
            end = start + len(self.blueprint.placement.units[path].leaves)
            if any(i in reads for i in range(start, end)):
                out.append(path)
            start = end
        return out
