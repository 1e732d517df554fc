"""Redistribution: the moves that reshard a tensor from one spec to another."""

from dataclasses import dataclass, field

from mpar.mesh import Mesh
from mpar.spec import P

__all__ = ["Move", "plan", "plan_bytes"]


@dataclass(frozen=True)
class Move:
    """One collective or narrowing over `axes`, and the spec `after` it. An all_to_all shards `dst` in the place of `dim`."""

    kind: str  # all_gather | reduce_scatter | all_reduce | all_to_all | shard
    axes: tuple[str, ...]
    dim: int
    dst: int
    after: P


def plan(source: P, target: P, rank: int, mesh: Mesh) -> list[Move]:
    """The moves from `source` to `target` for a tensor with `rank` dims.

    Pending sums are carried out first, by a reduce_scatter if the target is sharded over the axis, else by an all_reduce. Then
    come narrowings, which need no communication, then exchanges and gathers, then the narrowings that these make possible. Raises
    AssertionError if the target has a pending sum that the source does not have.
    """
    assert set(target.partial) <= set(source.partial), f"{source} cannot become {target}"
    route = _Route(list(source.padded(rank)), target.padded(rank), set(source.partial), mesh)
    route.carry_out_sums(set(source.partial) - set(target.partial))
    route.narrow()
    for dim in range(rank):
        route.exchange(dim)
    route.narrow()
    assert tuple(route.dims) == route.goal, (source, target, route.dims)
    return route.moves


@dataclass
class _Route:
    """The way from one spec to another: the spec so far (`dims` and `partial`), the dims of the target, and the moves so far."""

    dims: list[tuple[str, ...]]
    goal: tuple[tuple[str, ...], ...]
    partial: set[str]
    mesh: Mesh
    moves: list[Move] = field(default_factory=list)

    def move(self, kind: str, axes: tuple[str, ...], dim: int = 0, dst: int = 0) -> None:
        """Add a move; `dims` and `partial` are already those after it."""
        self.moves.append(Move(kind, axes, dim, dst, P(*self.dims, partial=self.mesh.ordered(self.partial))))

    def wanted(self, dim: int) -> tuple[str, ...]:
        """The axes that a dim still has to get; none if it must lose others first."""
        now = self.dims[dim]
        return self.goal[dim][len(now) :] if self.goal[dim][: len(now)] == now else ()

    def carry_out_sums(self, resolve: set[str]) -> None:
        """Carry out the pending sums over `resolve`: a reduce_scatter over axes that a dim wants next, else an all_reduce."""
        for dim in range(len(self.dims)):
            missing_axes = self.wanted(dim)
            scattered = missing_axes[: next((i for i, axis in enumerate(missing_axes) if axis not in resolve), len(missing_axes))]
            in_order = scattered == self.mesh.ordered(scattered)
            for group in [scattered] if in_order and scattered else [(axis,) for axis in scattered]:
                self.dims[dim] = (*self.dims[dim], *group)
                self.partial -= set(group)
                resolve -= set(group)
                self.move("reduce_scatter", group, dim)
        if resolve:
            self.partial -= resolve
            self.move("all_reduce", self.mesh.ordered(resolve))

    def narrow(self) -> None:
        """Narrow each dim that wants axes over which no dim is sharded; this needs no communication."""
        for dim in range(len(self.dims)):
            missing_axes = self.wanted(dim)
            if missing_axes and not {axis for other in self.dims for axis in other} & set(missing_axes):
                self.dims[dim] = self.goal[dim]
                self.move("shard", missing_axes, dim)

    def exchange(self, dim: int) -> None:
        """Remove the axes that a dim must lose, minor ones first, by an all_to_all to a dim that wants them next or a gather."""
        pairs = list(zip(self.dims[dim], self.goal[dim], strict=False))
        common = next((i for i, (now, then) in enumerate(pairs) if now != then), len(pairs))
        surplus = self.dims[dim][common:]
        while surplus:
            other, first, last = _receiver(self.dims, self.goal, dim, surplus, self.mesh)
            if last < len(surplus):  # no dim wants these
                self.gather(surplus[last:], dim)
            moved, surplus = surplus[first:last], surplus[:first]
            if moved:
                self.dims[dim] = self.dims[dim][: len(self.dims[dim]) - len(moved)]
                self.dims[other] = (*self.dims[other], *moved)
                self.move("all_to_all", moved, dim, other)

    def gather(self, axes: tuple[str, ...], dim: int) -> None:
        """Gather a dim over its last axes. A collective over several axes needs them in mesh order; otherwise they are gathered
        one by one, the minor first."""
        for group in [axes] if axes == self.mesh.ordered(axes) else [(axis,) for axis in reversed(axes)]:
            self.dims[dim] = self.dims[dim][: len(self.dims[dim]) - len(group)]
            self.move("all_gather", group, dim)


def _receiver(dims: list, goal: tuple, dim: int, surplus: tuple[str, ...], mesh: Mesh) -> tuple[int, int, int]:
    """(other dim, first, last): the other dim wants next the axes `surplus[first:last]`, which `dim` must lose.

    Of all such axes these are the most minor ones, and as many of them as possible. If no dim wants any, first and last are 0.
    """
    for last in range(len(surplus), 0, -1):
        for first in range(last):
            moved = surplus[first:last]
            for other in range(len(dims)) if moved == mesh.ordered(moved) else ():
                wider = (*dims[other], *moved)
                if other != dim and goal[other][: len(wider)] == wider:
                    return other, first, last
    return dim, 0, 0


def plan_bytes(moves: list[Move], global_bytes: int, mesh: Mesh) -> int:
    """The bytes that one rank receives in these moves, by which alternatives are compared."""
    total = 0
    for move in moves:
        size = mesh.axis_size(move.axes)
        after = global_bytes // max(mesh.axis_size(tuple(axis for dim in move.after.dims for axis in dim)), 1)
        total += {
            "all_gather": after * (size - 1) // size,
            "reduce_scatter": after * (size - 1),
            "all_reduce": 2 * after * (size - 1) // size,
            "all_to_all": after * (size - 1) // size,
            "shard": 0,
        }[move.kind]
    return total
