"""Gathers: parameters are brought from the specs at which they are stored to those at which they are used, a group at a time.

The units of each stage are grouped by themselves, so that the groups of a stage do not depend on what else a rank holds.
"""

from collections.abc import Sequence

from mpar.compiler.build._position import Position, Use
from mpar.compiler.build._units import Unit, group_of, kind_name, span
from mpar.compiler.build._writer import Writer
from mpar.ir import ALL_SLICES, Piece

__all__ = ["Gathers"]


class Gathers:
    """The parameters that are gathered at this point of a part.

    stored:   for each unit the values at which its parameters are stored.
    keep:     whether gathered parameters stay until the end of the step.
    present:  for each unit that is gathered now, its values.
    next:     the number of the use whose parameters are asked for.
    wanted:   for each use, the units that stay gathered after it.
    """

    def __init__(self, writer: Writer, position: Position, stored: dict[str, list[int]]) -> None:
        self.writer, self.stored = writer, stored
        self.uses, self.keep = position.uses(), position.blueprint.placement.strategy.gather == "keep"
        self.group_of = group_of(position.groups)
        self.present: dict[str, list[int]] = {}
        self.next = 0
        self.wanted = self._wanted()

    def _wanted(self) -> list[frozenset[str]]:
        """For each use, the units that stay gathered after it.

        If the next use is of the same round, these are the units of all groups from which the remaining uses of that round
        read; otherwise they are those of the groups from which the next use reads.
        """
        out: list[frozenset[str]] = []
        until_end: frozenset[str] = frozenset()  # the units that the next use and all later ones of its round need
        following: Use | None = None
        needed: frozenset[str] = frozenset()  # the units that the next use needs
        for use in reversed(self.uses):
            same = following is not None and following.round == use.round
            out.append(until_end if same else needed)
            needed = frozenset(unit.path for path in use.paths for unit in self.group_of[use.stage, path])
            until_end, following = (needed | until_end if same else needed), use
        return out[::-1]

    def parameters(self, paths: Sequence[str], microbatch: int) -> list[int]:
        """The values of the parameters at `paths`. Those that are not gathered yet are gathered with their group. For a
        path that this use does not read, as a backward need not read all parameters, the values are -1."""
        out: list[int] = []
        use = self.uses[self.next]
        for path in paths:
            if path in use.paths and path not in self.present:
                self._gather([unit for unit in self.group_of[use.stage, path] if unit.path not in self.present], microbatch)
            out.extend(self.present[path] if path in use.paths else [-1] * len(self.stored[path]))
        return out

    def _gather(self, units: list[Unit], microbatch: int) -> None:
        """Write one gather of the units that need one; the others are present as they are stored."""
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
        """Go on to the next use. Unless `keep`, forget all gathered units but those that are wanted after this use."""
        if not self.keep and self.present:
            wanted = self.wanted[self.next]
            self.present = {path: values for path, values in self.present.items() if path in wanted}
        self.next += 1
