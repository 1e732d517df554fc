"""Redistribution: the collectives that take a tensor from one spec to another."""

from dataclasses import dataclass

from mpar.mesh import Mesh
from mpar.spec import P

__all__ = ["Step", "plan", "plan_bytes"]


@dataclass(frozen=True)
class Step:
    """One collective or narrowing, and the spec after it."""

    kind: str  # all_gather | reduce_scatter | all_reduce | all_to_all | shard
    axes: tuple[str, ...]
    dim: int
    dst: int
    after: P


def plan(source: P, target: P, rank: int, mesh: Mesh) -> list[Step]:
    """The steps from `source` to `target` for a tensor with `rank` dims.

    Pending sums are carried out first, as a reduce_scatter where the target is sharded; then what is free (narrowing); then
    exchanges and gathers; then the narrowing that had to wait. Raises AssertionError if the target has a pending sum that the
    source has not.
    """
    dims = list(source.padded(rank))
    goal = target.padded(rank)
    partial = set(source.partial)
    assert set(target.partial) <= partial, f"{source} cannot become {target}"
    steps: list[Step] = []

    def step(kind: str, axes: tuple[str, ...], dim: int = 0, dst: int = 0) -> None:
        steps.append(Step(kind, axes, dim, dst, P(*dims, partial=mesh.ordered(partial))))

    def gather(axes: tuple[str, ...], dim: int) -> None:
        """Groups have their ranks in mesh order: axes in another one are gathered one by one, the minor first."""
        groups = [axes] if axes == mesh.ordered(axes) else [(axis,) for axis in reversed(axes)]
        for group in groups:
            dims[dim] = dims[dim][: len(dims[dim]) - len(group)]
            step("all_gather", group, dim)

    resolve = partial - set(target.partial)
    for dim in range(rank):
        extra = goal[dim][len(dims[dim]) :]
        count = next((i for i, axis in enumerate(extra) if axis not in resolve), len(extra))
        if goal[dim][: len(dims[dim])] == dims[dim] and count:
            scattered = extra[:count]
            for group in [scattered] if scattered == mesh.ordered(scattered) else [(axis,) for axis in scattered]:
                dims[dim] = (*dims[dim], *group)
                partial -= set(group)
                resolve -= set(group)
                step("reduce_scatter", group, dim)
    if resolve:
        partial -= resolve
        step("all_reduce", mesh.ordered(resolve))

    def narrow() -> None:
        for dim in range(rank):
            extra = goal[dim][len(dims[dim]) :]
            in_use = {axis for other in dims for axis in other}
            if extra and goal[dim][: len(dims[dim])] == dims[dim] and not in_use & set(extra):
                dims[dim] = goal[dim]
                step("shard", extra, dim)

    narrow()
    for dim in range(rank):
        common = next(
            (i for i, (a, b) in enumerate(zip(dims[dim], goal[dim], strict=False)) if a != b), min(len(dims[dim]), len(goal[dim]))
        )
        surplus = dims[dim][common:]
        while surplus:  # the minor axes go first
            other, first, last = _receiver(dims, goal, dim, surplus, mesh)
            if last < len(surplus):  # nobody wants these
                gather(surplus[last:], dim)
            moved, surplus = surplus[first:last], surplus[:first]
            if moved:
                dims[dim] = dims[dim][: len(dims[dim]) - len(moved)]
                dims[other] = (*dims[other], *moved)
                step("all_to_all", moved, dim, other)
    narrow()
    assert tuple(dims) == goal, (source, target, dims)
    return steps


def _receiver(dims: list, goal: tuple, dim: int, surplus: tuple[str, ...], mesh: Mesh) -> tuple[int, int, int]:
    """A dim that wants next the axes `surplus[first:last]` of `dim`: it, first, last. The most minor ones, as many as it wants.

    Without such a dim, first and last are 0.
    """
    for last in range(len(surplus), 0, -1):
        for first in range(last):
            moved = surplus[first:last]
            for other in range(len(dims)) if moved == mesh.ordered(moved) else ():
                wider = (*dims[other], *moved)
                if other != dim and goal[other][: len(wider)] == wider:
                    return other, first, last
    return dim, 0, 0


def plan_bytes(steps: list[Step], global_bytes: int, mesh: Mesh) -> int:
    """Bytes that one rank receives in these steps, for ordering alternatives."""
    total = 0
    for step in steps:
        size = mesh.axis_size(step.axes)
        after = global_bytes // max(mesh.axis_size(tuple(axis for dim in step.after.dims for axis in dim)), 1)
        total += {
            "all_gather": after * (size - 1) // size,
            "reduce_scatter": after * (size - 1),
            "all_reduce": 2 * after * (size - 1) // size,
            "all_to_all": after * (size - 1) // size,
            "shard": 0,
        }[step.kind]
    return total
