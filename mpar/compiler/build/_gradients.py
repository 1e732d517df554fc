"""Gradients: those of each use of a parameter are added up, then reduced to the specs at which gradients are stored, a group of
units at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mpar.compiler.build._position import Position
from mpar.compiler.build._units import Unit, group_of, kind_name, span
from mpar.compiler.build._values import like
from mpar.compiler.build._writer import Writer
from mpar.ir import Contribution, Piece

__all__ = ["Gradients", "use_name"]


def use_name(path: str, index: int, copy: int) -> str:
    """The name of a use: `embed@5` is unit `embed` as segment 5 reads it, `embed@5'` the same in the second copy of the stage."""
    return f"{path}@{index}{chr(39) * copy}"


class Gradients:
    """The sums of gradients so far, one for each use of a unit (see `use_name`); `finished_gradients` adds up the uses.

    Gradients come in the dtypes of compute, and are added up and reduced in those that precision says.

    The gradients of all slices of a microbatch are added before they are reduced; slice 0 comes last.

    each:          whether gradients are reduced after every microbatch; else after the last one.
    raw:           for each use, the sum of gradients that are not reduced yet; if `each`, by microbatch.
    reduced:       for each use, the sum of reduced gradients.
    contributions: for each value that a backward gives, which gradient it is.
    """

    def __init__(self, writer: Writer, position: Position) -> None:
        self.writer, self.position = writer, position
        self.each = position.blueprint.placement.strategy.reduces_each
        self.group_of = group_of(position.trained_groups)
        self.raw: dict[tuple[str, int], list[int]] = {}
        self.reduced: dict[str, list[int]] = {}
        self.contributions: dict[int, Contribution] = {}

    def take(self, stage: int, index: int, grads: list[int], piece: Piece) -> None:
        """Take the gradients that one backward of segment `index` gives, of all parameters of it that are trained."""
        blueprint, copy = self.position.blueprint, self.position.copies[stage]
        segment = blueprint.segments[index]
        reader = segment.name + "'" * copy
        self.contributions |= {
            v: Contribution(path, reader, piece) for v, path in zip(grads, blueprint.trained_paths(index), strict=True)
        }
        for unit in (blueprint.trained_units[path] for path in segment.paths if path in blueprint.trained_units):
            self._take_unit(stage, index, unit, grads[: len(unit.leaves)], piece)
            grads = grads[len(unit.leaves) :]

    def _take_unit(self, stage: int, index: int, unit: Unit, grads: list[int], piece: Piece) -> None:
        """Take the gradients of one unit. If its group gets no more from this microbatch, and a reduction is due, write it."""
        use = use_name(unit.path, index, self.position.copies[stage])
        key = self._key(use, piece)
        if key in self.raw:
            names, dtypes = [f"g {path}" for path in unit.paths], self._dtypes([leaf for _, leaf in unit.leaves])
            grads = self.writer.add(self.raw[key], grads, names, use, piece, dtypes)
        self.raw[key] = grads
        group = self.group_of[stage, unit.path]
        first = min(user for u in group for user in u.users)  # the backward reaches this segment last
        paths = self.position.blueprint.segments[index].paths
        in_group = [path for path in paths if self.group_of.get((stage, path)) is group]
        is_due = self.each or piece.microbatch == self.position.last_microbatches[stage]
        if index == first and unit.path == in_group[-1] and piece.slice == 0 and is_due:
            self._reduce(stage, group, piece)

    def _reduce(self, stage: int, group: list[Unit], piece: Piece) -> None:
        """Write one reduction of all uses of a group, and add the results to those of earlier microbatches."""
        uses = [(unit, use_name(unit.path, user, self.position.copies[stage])) for unit in group for user in unit.users]
        units = [unit for unit, _ in uses]
        inputs = [v for _, use in uses for v in self.raw.pop(self._key(use, piece))]
        leaves = [leaf for unit in units for _, leaf in unit.leaves]
        code = self.writer.functions.cast(
            f"reduce {kind_name(units)}",
            [like(leaf, self.writer.values[v].dtype) for leaf, v in zip(leaves, inputs, strict=True)],
            self._dtypes(leaves),
            self.writer.values.specs(inputs),
            [spec for unit in units for spec in unit.grad],
        )
        names = [f"g {path}@{use.rpartition('@')[2]}" for unit, use in uses for path in unit.paths]
        out = self.writer.emit("reduce", code, inputs, names, span(units), piece)
        for unit, use in uses:
            of_use, out = out[: len(unit.leaves)], out[len(unit.leaves) :]
            if use in self.reduced:
                of_use = self.writer.add(self.reduced[use], of_use, [f"g {path}" for path in unit.paths], unit.path, piece)
            self.reduced[use] = of_use

    def _key(self, use: str, piece: Piece) -> tuple[str, int]:
        return use, piece.microbatch if self.each else 0

    def _dtypes(self, leaves: Sequence[Tensor]) -> list[torch.dtype]:
        """The dtypes in which gradients of these leaves are added up."""
        return [self.position.blueprint.placement.precision.grad_dtype(leaf.dtype) for leaf in leaves]

    def take_reduced(self, use: str) -> list[int]:
        """The finished gradients of one use, which are then forgotten here."""
        return self.reduced.pop(use)
