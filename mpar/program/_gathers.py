"""Gathers and reductions: parameters come from storage to where they are used, gradients go back, a group of units at a time."""

from collections.abc import Sequence

from mpar.chain import Segment
from mpar.precision import Precision
from mpar.program._units import Unit, kind_name, span
from mpar.program._writer import Writer, like
from mpar.strategy import Strategy

__all__ = ["Gathers", "Gradients"]


class Gathers:
    """Which parameters are there at this point of the program. `stored` are the values of each unit at rest."""

    def __init__(
        self, writer: Writer, segments: Sequence[Segment], groups: list[list[Unit]], stored: dict[str, list[int]], keep: bool
    ) -> None:
        self.writer, self.segments, self.groups, self.stored, self.keep = writer, segments, groups, stored, keep
        self.group_of = {unit.path: group for group in groups for unit in group}
        self.present: dict[str, list[int]] = {}

    def parameters(self, index: int, microbatch: int, reads: Sequence[int] | None = None) -> list[int]:
        """The values of the parameters of segment `index`, gathered with their group if they are not there yet.

        `reads`: positions of those that are wanted; a path without any is not gathered, and -1 stands for its values.
        """
        out: list[int] = []
        for path in self.segments[index].paths:
            count = len(self.stored[path])
            wanted = reads is None or any(len(out) <= i < len(out) + count for i in reads)
            if wanted and path not in self.present:
                self._gather([unit for unit in self.group_of[path] if unit.path not in self.present], microbatch)
            out.extend(self.present[path] if wanted else [-1] * count)
        return out

    def _gather(self, units: list[Unit], microbatch: int) -> None:
        self.present |= {unit.path: self.stored[unit.path] for unit in units if not unit.needs_gather}
        units = [unit for unit in units if unit.needs_gather]
        if not units:
            return
        code = self.writer.cast(
            f"gather {kind_name(units)}",
            [leaf for unit in units for _, leaf in unit.leaves],
            [dtype for unit in units for dtype in unit.compute_dtypes],
            [spec for unit in units for spec in unit.storage],
            [spec for unit in units for spec in unit.compute],
        )
        names = [f"w {path}" for unit in units for path in unit.paths]
        inputs = [v for unit in units for v in self.stored[unit.path]]
        out = self.writer.emit("gather", code, inputs, names, span(units), microbatch, "gather")
        for unit in units:
            self.present[unit.path], out = out[: len(unit.leaves)], out[len(unit.leaves) :]

    def drop(self, index: int, *, backward: bool) -> None:
        """Forget the groups that segment `index` was the last to read, but those that backward reads at once."""
        if self.keep:
            return
        for group in self.groups:
            users = [user for unit in group for user in unit.users]
            read_again = not backward and max(users) == len(self.segments) - 1
            if index == (min(users) if backward else max(users)) and not read_again:
                for unit in group:
                    self.present.pop(unit.path, None)


class Gradients:
    """Sums of gradients. Each use of a unit (`path@segment`) has its own; uses are added once, at the end, in chain order."""

    def __init__(self, writer: Writer, groups: list[list[Unit]], precision: Precision, strategy: Strategy, last: int) -> None:
        self.writer, self.precision, self.each, self.last = writer, precision, strategy.reduces_each, last
        self.group_of = {unit.path: group for group in groups for unit in group}
        self.raw: dict[str, list[int]] = {}  # as backward gives them, accumulated if they are reduced last
        self.reduced: dict[str, list[int]] = {}

    def take(self, segment: Segment, index: int, unit: Unit, grads: list[int], microbatch: int) -> None:
        """Note the gradients of one use; after the last backward that gives any to a group, reduce the group."""
        use = f"{unit.path}@{index}"
        if use in self.raw:
            grads = self.writer.add(self.raw[use], grads, [f"g {path}" for path in unit.paths], use, microbatch)
        self.raw[use] = grads
        group = self.group_of[unit.path]
        first = min(user for u in group for user in u.users)  # backward reaches it last
        own = [path for path in segment.paths if self.group_of[path] is group]
        if index == first and unit.path == own[-1] and (self.each or microbatch == self.last):
            self._reduce(group, microbatch)

    def _reduce(self, group: list[Unit], microbatch: int) -> None:
        uses = [(unit, f"{unit.path}@{user}") for unit in group for user in unit.users]
        units = [unit for unit, _ in uses]
        inputs = [v for _, use in uses for v in self.raw.pop(use)]
        leaves = [leaf for unit in units for _, leaf in unit.leaves]
        code = self.writer.cast(
            f"reduce {kind_name(units)}",
            [like(leaf, self.writer.values[v].dtype) for leaf, v in zip(leaves, inputs, strict=True)],
            [self.precision.grad_dtype(leaf.dtype) for leaf in leaves],
            self.writer.specs(inputs),
            [spec for unit in units for spec in unit.grad],
        )
        names = [f"g {path}@{use.rpartition('@')[2]}" for unit, use in uses for path in unit.paths]
        out = self.writer.emit("reduce", code, inputs, names, span(units), microbatch, "reduce")
        for unit, use in uses:
            own, out = out[: len(unit.leaves)], out[len(unit.leaves) :]
            if use in self.reduced:
                own = self.writer.add(self.reduced[use], own, [f"g {path}" for path in unit.paths], unit.path, microbatch)
            self.reduced[use] = own

    def total(self, unit: Unit) -> list[int]:
        """The finished gradients of a unit."""
        first, *rest = (self.reduced.pop(f"{unit.path}@{user}") for user in unit.users)
        for other in rest:
            first = self.writer.add(first, other, [f"g {path}" for path in unit.paths], unit.path)
        return first
