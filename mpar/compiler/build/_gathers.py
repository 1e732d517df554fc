"""Gathers: parameters come from where they are stored to where they are used, a group of units at a time.

Groups are made stage by stage, so that they do not depend on what else lives on a rank.
"""

from collections.abc import Sequence

from mpar.compiler.build._position import Position, Use
from mpar.compiler.build._units import Unit, group_of, kind_name, span
from mpar.compiler.build._writer import Writer
from mpar.ir import ALL_SLICES, Piece

__all__ = ["Gathers"]


class Gathers:
    """Which parameters are there at this point of a part.

    stored: the values of each unit at rest. keep: what is gathered stays until the end of the step. next: the number of the use
    that comes next.
    """

    def __init__(self, writer: Writer, position: Position, stored: dict[str, list[int]]) -> None:
        self.writer, self.stored = writer, stored
        self.uses, self.keep = position.uses(), position.blueprint.placement.strategy.gather == "keep"
        self.group_of = group_of(position.groups)
        self.present: dict[str, list[int]] = {}
        self.next = 0
        self.wanted = self._wanted()  # per use, units that stay gathered after it

    def _wanted(self) -> list[frozenset[str]]:
        """Units in groups that the next use reads, or a later one of the same action."""
        out: list[frozenset[str]] = []
        until_end: frozenset[str] = frozenset()  # what the uses from the next one to the end of its action read
        following: Use | None = None
        first: frozenset[str] = frozenset()  # what the next use reads
        for use in reversed(self.uses):
            same = following is not None and following.action == use.action
            out.append(until_end if same else first)
            first = frozenset(unit.path for path in use.paths for unit in self.group_of[use.stage, path])
            until_end, following = (first | until_end if same else first), use
        return out[::-1]

    def parameters(self, paths: Sequence[str], microbatch: int) -> list[int]:
        """The values of the parameters at `paths`, gathered with their group if they are not there yet; -1 for a path that this
        use does not read."""
        out: list[int] = []
        use = self.uses[self.next]
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
        code = self.writer.functions.cast(
            f"gather {kind_name(units)}",
            [leaf for unit in units for _, leaf in unit.leaves],
            [dtype for unit in units for dtype in unit.compute_dtypes],
            [spec for unit in units for spec in unit.storage],
            [spec for unit in units for spec in unit.compute],
        )
        names = [f"w {path}" for unit in units for path in unit.paths]
        inputs = [v for unit in units for v in self.stored[unit.path]]
        out = self.writer.emit("gather", code, inputs, names, span(units), Piece(microbatch, ALL_SLICES))
        for unit in units:
            self.present[unit.path], out = out[: len(unit.leaves)], out[len(unit.leaves) :]

    def next_use(self) -> None:
        """The use is over. Forget what is gathered, but groups that the next use reads, or a later one of the same action."""
        if not self.keep and self.present:
            wanted = self.wanted[self.next]
            self.present = {path: values for path, values in self.present.items() if path in wanted}
        self.next += 1
