"""Gathers and reductions: parameters come from storage to where they are used, gradients go back, a group of units at a time.

Groups are made stage by stage, so that they do not depend on what else lives on a rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpar.precision import Precision
from mpar.compiler.build._units import Unit, kind_name, span
from mpar.compiler.build._writer import Writer, like
from mpar.strategy import Strategy

__all__ = ["Gathers", "Gradients", "Use", "use_name"]

Groups = Mapping[int, list[list[Unit]]]


@dataclass(frozen=True)
class Use:
    """One segment that is run: in which action of its rank, of which stage, and the paths whose parameters it reads."""

    action: int
    stage: int
    paths: frozenset[str]


class Gathers:
    """Which parameters are there at this point of a part.

    groups: by stage. stored: the values of each unit at rest. uses: every segment that the part runs, in order.
    """

    def __init__(self, writer: Writer, groups: Groups, stored: dict[str, list[int]], uses: Sequence[Use], keep: bool) -> None:
        self.writer, self.stored, self.uses, self.keep = writer, stored, uses, keep
        self.group_of = {(stage, unit.path): group for stage, own in groups.items() for group in own for unit in group}
        self.present: dict[str, list[int]] = {}
        self.position = 0
        self.wanted = self._wanted()  # per use, units that stay gathered after it

    def _wanted(self) -> list[frozenset[str]]:
        """Units in groups that the next use reads, or a later one of the same action."""
        out: list[frozenset[str]] = []
        rest: frozenset[str] = frozenset()  # what the uses from the next one to the end of its action read
        following: Use | None = None
        first: frozenset[str] = frozenset()  # what the next use reads
        for use in reversed(self.uses):
            same = following is not None and following.action == use.action
            out.append(rest if same else first)
            first = frozenset(unit.path for path in use.paths for unit in self.group_of[use.stage, path])
            rest, following = (first | rest if same else first), use
        return out[::-1]

    def parameters(self, paths: Sequence[str], microbatch: int) -> list[int]:
        """The values of the parameters at `paths`, gathered with their group if they are not there yet; -1 for a path that this
        use does not read."""
        out: list[int] = []
        use = self.uses[self.position]
        for path in paths:
            if path in use.paths and path not in self.present:
                self._gather([unit for unit in self.group_of[use.stage, path] if unit.path not in self.present], microbatch)
            out.extend(self.present[path] if path in use.paths else [-1] * len(self.stored[path]))
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

    def next_use(self) -> None:
        """The use is over. Forget what is gathered, but groups that the next use reads, or a later one of the same action."""
        if not self.keep and self.present:
            wanted = self.wanted[self.position]
            self.present = {path: values for path, values in self.present.items() if path in wanted}
        self.position += 1


def use_name(path: str, index: int, copy: int) -> str:
    """`embed@5`: the use of a unit by segment 5; `embed@5'`: in the second copy of the stage."""
    return f"{path}@{index}{chr(39) * copy}"


class Gradients:
    """Sums of gradients. Each use of a unit (see `use_name`) has its own; uses are added once, at the end, in chain order.

    groups: by stage, with the segments of that stage as users. last: by stage, the microbatch whose gradients come last.
    num_slices: pieces of a microbatch, of which the first is done last; they are added before anything is reduced.
    copies: by stage, which copy of it this part holds.
    """

    def __init__(
        self,
        writer: Writer,
        groups: Groups,
        precision: Precision,
        strategy: Strategy,
        last: dict[int, int],
        copies: dict[int, int],
        num_slices: int,
    ) -> None:
        self.writer, self.precision, self.each = writer, precision, strategy.reduces_each
        self.last, self.copies, self.num_slices = last, copies, num_slices
        self.group_of = {(stage, unit.path): group for stage, own in groups.items() for group in own for unit in group}
        self.raw: dict[str, list[int]] = {}  # as backward gives them, accumulated if they are reduced last
        self.reduced: dict[str, list[int]] = {}

    def take(self, stage: int, index: int, paths: Sequence[str], unit: Unit, grads: list[int], piece: int) -> None:
        """Note the gradients of one use, that of segment `index`, which reads `paths`; after the last backward that gives any to
        a group, reduce the group."""
        use = use_name(unit.path, index, self.copies[stage])
        if use in self.raw:
            grads = self.writer.add(self.raw[use], grads, [f"g {path}" for path in unit.paths], use, piece)
        self.raw[use] = grads
        group = self.group_of[stage, unit.path]
        first = min(user for u in group for user in u.users)  # backward reaches it last
        own = [path for path in paths if self.group_of[stage, path] is group]
        microbatch, c = divmod(piece, self.num_slices)
        if index == first and unit.path == own[-1] and c == 0 and (self.each or microbatch == self.last[stage]):
            self._reduce(stage, group, piece)

    def _reduce(self, stage: int, group: list[Unit], piece: int) -> None:
        uses = [(unit, use_name(unit.path, user, self.copies[stage])) for unit in group for user in unit.users]
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
        out = self.writer.emit("reduce", code, inputs, names, span(units), piece, "reduce")
        for unit, use in uses:
            own, out = out[: len(unit.leaves)], out[len(unit.leaves) :]
            if use in self.reduced:
                own = self.writer.add(self.reduced[use], own, [f"g {path}" for path in unit.paths], unit.path, piece)
            self.reduced[use] = own

    def take_reduced(self, use: str) -> list[int]:
        """The finished gradients of one use."""
        return self.reduced.pop(use)
