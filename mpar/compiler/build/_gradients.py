"""Gradients: they are added up use by use, and reduced to where they are stored, a group of units at a time."""

from mpar.compiler.build._position import Position
from mpar.compiler.build._units import Unit, group_of, kind_name, span
from mpar.compiler.build._values import like
from mpar.compiler.build._writer import Writer
from mpar.ir import Contribution, Piece

__all__ = ["Gradients", "use_name"]


def use_name(path: str, index: int, copy: int) -> str:
    """`embed@5`: the use of a unit by segment 5; `embed@5'`: in the second copy of the stage."""
    return f"{path}@{index}{chr(39) * copy}"


class Gradients:
    """Sums of gradients. Each use of a unit (see `use_name`) has its own; uses are added once, at the end, in chain order.

    Slices of a microbatch, of which the first is done last, are added before anything is reduced.

    raw: as backward gives them, accumulated if they are reduced last. reduced: at rest. contributions: what each gradient is.
    """

    def __init__(self, writer: Writer, position: Position) -> None:
        self.writer, self.position = writer, position
        self.each = position.blueprint.placement.strategy.reduces_each
        self.group_of = group_of(position.groups)
        self.raw: dict[str, list[int]] = {}
        self.reduced: dict[str, list[int]] = {}
        self.contributions: dict[int, Contribution] = {}

    def take(self, stage: int, index: int, grads: list[int], piece: Piece) -> None:
        """Note the gradients of all parameters that segment `index` reads."""
        blueprint, copy = self.position.blueprint, self.position.copies[stage]
        segment = blueprint.segments[index]
        use = segment.name + "'" * copy
        self.contributions |= {
            v: Contribution(path, use, piece) for v, path in zip(grads, blueprint.leaf_paths(index), strict=True)
        }
        for path in segment.paths:
            unit = blueprint.placement.units[path]
            self._take_unit(stage, index, unit, grads[: len(unit.leaves)], piece)
            grads = grads[len(unit.leaves) :]

    def _take_unit(self, stage: int, index: int, unit: Unit, grads: list[int], piece: Piece) -> None:
        """Note those of one unit; after the last backward that gives any to a group, reduce the group."""
        use = use_name(unit.path, index, self.position.copies[stage])
        if use in self.raw:
            grads = self.writer.add(self.raw[use], grads, [f"g {path}" for path in unit.paths], use, piece)
        self.raw[use] = grads
        group = self.group_of[stage, unit.path]
        first = min(user for u in group for user in u.users)  # backward reaches it last
        in_group = [path for path in self.position.blueprint.segments[index].paths if self.group_of[stage, path] is group]
        is_due = self.each or piece.microbatch == self.position.last_microbatches[stage]
        if index == first and unit.path == in_group[-1] and piece.slice == 0 and is_due:
            self._reduce(stage, group, piece)

    def _reduce(self, stage: int, group: list[Unit], piece: Piece) -> None:
        uses = [(unit, use_name(unit.path, user, self.position.copies[stage])) for unit in group for user in unit.users]
        units = [unit for unit, _ in uses]
        inputs = [v for _, use in uses for v in self.raw.pop(use)]
        leaves = [leaf for unit in units for _, leaf in unit.leaves]
        code = self.writer.functions.cast(
            f"reduce {kind_name(units)}",
            [like(leaf, self.writer.values[v].dtype) for leaf, v in zip(leaves, inputs, strict=True)],
            [self.position.blueprint.placement.precision.grad_dtype(leaf.dtype) for leaf in leaves],
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

    def take_reduced(self, use: str) -> list[int]:
        """The finished gradients of one use."""
        return self.reduced.pop(use)
