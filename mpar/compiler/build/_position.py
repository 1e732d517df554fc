"""Position: what the ranks at one position along pp hold and do, before any instruction is written."""

import functools
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from mpar.compiler.build._blueprint import Blueprint
from mpar.compiler.build._units import Unit, group_units
from mpar.compiler.segment import SegmentCode, split_segment
from mpar.schedules import Action

__all__ = ["Position", "Use"]


@dataclass(frozen=True)
class Use:
    """One segment that is run: in which action of its rank, of which stage, and the paths whose parameters it reads."""

    action: int
    stage: int
    paths: frozenset[str]


@dataclass(frozen=True)
class Position:
    """number: the coordinate along pp."""

    blueprint: Blueprint
    number: int

    @functools.cached_property
    def actions(self) -> list[Action]:
        """What it does of the schedule, in order."""
        return self.blueprint.pipeline.table[self.number]

    @functools.cached_property
    def stages(self) -> list[int]:
        """The stages of which it holds a copy, ascending."""
        return self.blueprint.pipeline.stages_at(self.number)

    @functools.cached_property
    def copies(self) -> dict[int, int]:
        """By stage, which copy of it this position holds."""
        return {stage: self.blueprint.pipeline.positions[stage].index(self.number) for stage in self.stages}

    @functools.cached_property
    def units(self) -> dict[str, Unit]:
        """The units that its segments read, by path."""
        held = {segment for stage in self.stages for segment in self.blueprint.pipeline.ranges[stage]}
        return {path: unit for path, unit in self.blueprint.placement.units.items() if held & set(unit.users)}

    @functools.cached_property
    def groups(self) -> dict[int, list[list[Unit]]]:
        """By stage, the units that its segments read, in groups that are gathered and reduced together."""
        return {stage: self._groups(self.blueprint.pipeline.ranges[stage]) for stage in self.stages}

    def _groups(self, segments: range) -> list[list[Unit]]:
        units: dict[str, Unit] = {}
        for index in segments:
            for path in self.blueprint.segments[index].paths:
                unit = self.blueprint.placement.units[path]
                units.setdefault(path, replace(unit, users=[user for user in unit.users if user in segments]))
        return group_units(list(units.values()), self.blueprint.options.bucket_bytes)

    @functools.cached_property
    def last_microbatches(self) -> dict[int, int]:
        """By stage, the microbatch whose gradients come last."""
        return {action.stage: action.microbatch for action in self.actions if action.kind in "BW"}

    @functools.cached_property
    def _forwards(self) -> frozenset[Action]:
        return frozenset(action for action in self.actions if action.kind == "F")

    @functools.cached_property
    def _undivided(self) -> frozenset[tuple[int, int]]:
        """Stages and microbatches whose backward is not cut in two."""
        return frozenset(
            (stage, m)
            for stage, kind, m in self.actions
            if kind == "B" or (kind == "W" and self.blueprint.pipeline.ranges[stage].start == 0)
        )

    def runs(self, stage: int, microbatch: int) -> bool:
        """Whether it runs the stage on that microbatch: a value then passes without a message."""
        return Action(stage, "F", microbatch) in self._forwards

    def is_joint(self, segment: int, stage: int, microbatch: int) -> bool:
        """Whether a segment's forward and backward are one: it gives losses only, and its backward is not cut in two."""
        return self.blueprint.codes[segment][0].joint is not None and (stage, microbatch) in self._undivided

    def holders(self, unit: Unit) -> list[int]:
        """Positions along pp that hold the unit, in the order of its uses."""
        return list(dict.fromkeys(at for _, _, at in self.blueprint.pipeline.uses(unit.users)))

    def uses(self) -> list[Use]:
        """Every segment that is run, in order, with the parameters that it reads."""
        uses = []
        for number, action in enumerate(self.actions):
            segments = self.blueprint.pipeline.ranges[action.stage]
            for index in segments if action.kind == "F" else reversed(segments):
                reads = self._parameters_read(index, action, first=segments.start == 0)
                if reads is not None:
                    uses.append(
                        Use(number, action.stage, frozenset(self._paths_read(self.blueprint.segments[index].paths, reads)))
                    )
        return uses

    def _parameters_read(self, segment: int, action: Action, *, first: bool) -> Set[int] | None:
        """Numbers of the primals that a segment reads in an action of its stage, the parameters among them; None: it is not run.

        first: of the first stage, whose backward is all left to W, as nobody waits for the gradient of its input.
        """
        codes: Sequence[SegmentCode] = self.blueprint.codes[segment]
        joint = self.is_joint(segment, action.stage, action.microbatch)
        if (joint and action.kind == "F") or (action.kind == "I" and (joint or first)):
            return None
        if joint or action.kind == "F":
            return set(range(codes[0].traced.num_params))
        if first or action.kind == "B":
            return {i for code in codes for i in code.reads}
        halves = map(split_segment, codes)
        return {i for half in halves for i in (half.input_reads if action.kind == "I" else half.weight_reads)}

    def _paths_read(self, paths: Sequence[str], reads: Set[int]) -> list[str]:
        """Those of `paths` of whose parameters at least one is among the primals `reads`."""
        out, start = [], 0
        for path in paths:
            end = start + len(self.blueprint.placement.units[path].leaves)
            if any(i in reads for i in range(start, end)):
                out.append(path)
            start = end
        return out
