"""Contexts: what segments may read besides parameters and x. The context of a piece is computed when it is first read."""

import functools

from mpar import tree
from mpar.chain import CONTEXT_OF_PAST, context_of
from mpar.compiler.build._blueprint import Blueprint
from mpar.compiler.build._boundary import Boundary
from mpar.compiler.build._placement import global_results
from mpar.compiler.build._writer import Writer
from mpar.ir import Piece

__all__ = ["Contexts"]


class Contexts:
    """The contexts of all pieces. made: for each piece whose context is already written, the values of that context."""

    def __init__(self, writer: Writer, blueprint: Blueprint, boundary: Boundary) -> None:
        self.writer, self.blueprint, self.boundary = writer, blueprint, boundary
        self.made: dict[Piece, list[int]] = {}

    @functools.cached_property
    def _paths(self) -> list[str]:
        return tree.paths(global_results(self.blueprint.placement.context, self.blueprint.placement.mesh))

    def of(self, piece: Piece) -> list[int]:
        """The values of the context of a piece."""
        if piece not in self.made:
            names = [f"{path}.mb{self.blueprint.piece_name(piece)}" for path in self._paths]
            inputs = self.boundary.batch_values[piece]
            self.made[piece] = self.writer.emit("context", self.blueprint.placement.context, inputs, names, "", piece)
        return self.made[piece]

    def read_by(self, segment: int, piece: Piece) -> list[int]:
        """The context that a segment reads for a piece: the piece's, then the entries CONTEXT_OF_PAST of past slices."""
        entries = dict(zip(self._paths, self.of(piece), strict=True))
        read = list(context_of(self.blueprint.segments[segment].name, entries).values())
        for earlier in self.blueprint.past(segment, piece):
            past = dict(zip(self._paths, self.of(earlier), strict=True))
            read += [past[key] for key in CONTEXT_OF_PAST if key in past]
        return read
