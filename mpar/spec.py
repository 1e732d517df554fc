"""P: the spec of a tensor: for every dim the mesh axes that shard it, and the mesh axes over which it is a pending sum."""

from dataclasses import dataclass

from mpar.errors import ShardingError
from mpar.mesh import Mesh

__all__ = ["P", "check_spec", "local_shape", "normalise"]


@dataclass(frozen=True, init=False)
class P:
    """`P("fsdp", None, ("cp", "tp"))`: dim 0 is sharded over fsdp, dim 2 over cp and tp (cp major), dim 1 is not.

    Dims that are left out at the end are not sharded, so `P()` is replicated. `partial` names the axes over which the tensor is
    a pending sum: its global value is the sum of the local ones.
    """

    dims: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...]

    def __init__(self, *dims: str | tuple[str, ...] | None, partial: str | tuple[str, ...] = ()) -> None:
        as_tuples = [() if dim is None else (dim,) if isinstance(dim, str) else tuple(dim) for dim in dims]
        partial = (partial,) if isinstance(partial, str) else tuple(partial)
        used = [axis for dim in as_tuples for axis in dim] + list(partial)
        repeated = sorted({axis for axis in used if used.count(axis) > 1})
        if repeated:
            raise ShardingError(
                f"P{tuple(dims)} partial={partial} uses mesh axes {repeated} more than once: an axis shards one dim"
            )
        while as_tuples and not as_tuples[-1]:
            as_tuples.pop()
        object.__setattr__(self, "dims", tuple(as_tuples))
        object.__setattr__(self, "partial", partial)

    def dim(self, index: int) -> tuple[str, ...]:
        """The axes that shard dim `index`, major first."""
        return self.dims[index] if index < len(self.dims) else ()

    def padded(self, rank: int) -> tuple[tuple[str, ...], ...]:
        """`dims` with one entry for each of the `rank` dims of a tensor."""
        return tuple(self.dim(index) for index in range(rank))

    @property
    def axes(self) -> frozenset[str]:
        """Every mesh axis that the spec mentions."""
        return frozenset(axis for dim in self.dims for axis in dim) | frozenset(self.partial)

    def without_partial(self) -> "P":
        """The same spec with no pending sums."""
        return P(*self.dims)

    def __repr__(self) -> str:
        dims = [repr(dim[0]) if len(dim) == 1 else "None" if not dim else repr(dim) for dim in self.dims]
        partial = (
            [f"partial={self.partial[0]!r}" if len(self.partial) == 1 else f"partial={self.partial!r}"] if self.partial else []
        )
        return f"P({', '.join(dims + partial)})"


def normalise(spec: P, mesh: Mesh) -> P:
    """`spec` without mesh axes of size 1 and with `partial` in mesh order, so that equal placements compare equal."""
    dims = [tuple(axis for axis in dim if mesh.axis_size(axis) > 1) for dim in spec.dims]
    return P(*dims, partial=mesh.ordered(spec.partial))


def local_shape(shape: tuple[int, ...], spec: P, mesh: Mesh) -> tuple[int, ...]:
    """The shape of one rank's shard of a tensor of global `shape`. The axes must divide it, which `check_spec` checks."""
    return tuple(size // mesh.axis_size(spec.dim(index)) for index, size in enumerate(shape))


def check_spec(name: str, shape: tuple[int, ...], spec: object, mesh: Mesh, *, any_order: bool = False) -> list[str]:
    """The problems of placing a tensor of `shape` by `spec` on `mesh`, one line each; empty if there are none.

    any_order: the axes of a dim need not be in mesh order, as for values inside a program.
    """
    if not isinstance(spec, P):
        return [f"{name} {tuple(shape)}: {spec!r} is not a spec; write P(...)"]
    problems = []
    unknown = sorted(axis for axis in spec.axes if axis not in mesh.axes)
    if unknown:
        problems.append(f"{name} {tuple(shape)} by {spec}: {mesh} has no axis {unknown}")
    if len(spec.dims) > len(shape):
        problems.append(f"{name} {tuple(shape)} by {spec}: the spec has {len(spec.dims)} dims, the tensor has {len(shape)}")
    for index, (size, axes) in enumerate(zip(shape, spec.padded(len(shape)), strict=True)):
        order = tuple(axis for axis in mesh.axes if axis in axes)
        if not unknown and axes != order and not any_order:
            problems.append(f"{name} {tuple(shape)} by {spec}: dim {index} must name its axes in mesh order, {order}")
        if size % mesh.axis_size(axes):
            problems.append(
                f"{name} {tuple(shape)} by {spec}: dim {index} has size {size}, "
                f"which {' x '.join(f'{axis}={mesh.axis_size(axis)}' for axis in axes)} does not divide"
            )
    return problems
