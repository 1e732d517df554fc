"""Blueprint: what is known of a program before its instructions are written, the same for all positions along pp."""

import functools
from dataclasses import dataclass

from mpar.chain import Chain, Segment
from mpar.compiler.build._options import CompileOptions
from mpar.compiler.build._pipeline import Pipeline
from mpar.compiler.build._placement import Placement
from mpar.compiler.build._units import Unit
from mpar.compiler.segment import Slices
from mpar.ir import Piece
from mpar.optimizer import Optimizer

__all__ = ["Blueprint"]


@dataclass(frozen=True)
class Blueprint:
    """One training step, or one run of the forwards if `optimizer` is None, before any instruction is written."""

    model: Chain
    optimizer: Optimizer | None
    options: CompileOptions
    placement: Placement
    pipeline: Pipeline

    @functools.cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The functions of the chain."""
        return self.model.segments

    @property
    def codes(self) -> list[Slices]:
        """For each segment, the code of every slice."""
        return self.placement.segments.by_segment

    def pieces(self, microbatch: int) -> list[Piece]:
        """The pieces of a microbatch: one for each slice."""
        return [Piece(microbatch, c) for c in range(self.options.num_slices)]

    @functools.cached_property
    def all_pieces(self) -> list[Piece]:
        """The pieces of all microbatches, in order."""
        return [piece for m in range(self.options.num_microbatches) for piece in self.pieces(m)]

    def past(self, segment: int, piece: Piece) -> list[Piece]:
        """The earlier pieces of the same rows from which `piece` reads what the segment carried over."""
        reach = self.placement.segments.reach[segment]
        return [Piece(piece.microbatch, c) for c in range(max(0, piece.slice - reach), piece.slice)]

    def num_entering(self, segment: int) -> int:
        """The number of leaves of the x that enters a segment. One past the last: of the x that leaves the chain."""
        return len(self.placement.segments.entering[segment])

    def num_carried(self, segment: int) -> int:
        """The number of leaves that a slice of a segment carries over to later slices."""
        if not self.placement.segments.reach[segment]:
            return 0
        return len(self.codes[segment][0].traced.x_out) - self.num_entering(segment + 1)

    def num_active_carried(self, segment: int, slice_number: int) -> int:
        """The number of these leaves that depend on a parameter that is trained, for one slice."""
        if not self.num_carried(segment):
            return 0
        traced, first = self.codes[segment][slice_number].traced, self.num_entering(segment + 1)
        return sum(first <= i < len(traced.x_out) for i in traced.active_out)

    @functools.cached_property
    def trained_units(self) -> dict[str, Unit]:
        """The units by path, each with only those of its parameters that are trained; none without such."""
        return {path: unit.only(unit.trained) for path, unit in self.placement.units.items() if unit.trained}

    def trained_paths(self, segment: int) -> list[str]:
        """The path of every parameter of a segment that is trained."""
        units = (self.trained_units.get(path) for path in self.segments[segment].paths)
        return [path for unit in units if unit is not None for path in unit.paths]

    @functools.cached_property
    def messages_per_edge(self) -> int:
        """How many message numbers are reserved for each transfer between stages: one for each leaf of x of each slice."""
        return self.options.num_slices * max(len(leaves) for leaves in self.placement.segments.entering) or 1

    def piece_name(self, piece: Piece) -> str:
        """How a piece is written in the names of values: `3`, or `3.0` if there are several slices."""
        return f"{piece.microbatch}.{piece.slice}" if self.options.num_slices > 1 else f"{piece.microbatch}"
