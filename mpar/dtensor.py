"""The boundary to torch's DTensor: specs to placements and back, shards to DTensors and back. No step calls it."""

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from mpar.errors import MeshError, ShardingError
from mpar.mesh import Mesh
from mpar.spec import P

__all__ = ["from_placements", "mesh_of", "to_local", "to_placements", "wrap"]


def to_placements(spec: P, mesh: Mesh) -> list[Placement]:
    """One placement for each axis of `mesh`.

    Raises ShardingError if the axes of a dim are not in mesh order, which placements cannot express.
    """
    placements: list[Placement] = []
    for dim, axes in enumerate(spec.dims):
        if tuple(axis for axis in mesh.axes if axis in axes) != axes:
            raise ShardingError(
                f"cannot convert {spec}: dim {dim} has its axes in another order than {mesh}, which DTensor cannot express"
            )
    for axis in mesh.axes:
        sharded_dim = next((dim for dim, axes in enumerate(spec.dims) if axis in axes), None)
        placements.append(Partial() if axis in spec.partial else Replicate() if sharded_dim is None else Shard(sharded_dim))
    return placements


def from_placements(placements: Sequence[Placement], mesh: Mesh, ndim: int) -> P:
    """The spec of a tensor with `ndim` dims. Raises ShardingError for other placements (strided shards, maxima)."""
    dims: list[list[str]] = [[] for _ in range(ndim)]
    partial = []
    for axis, placement in zip(mesh.axes, placements, strict=True):
        if type(placement) is Shard:
            dims[placement.dim % ndim].append(axis)
        elif type(placement) is Partial and placement.reduce_op == "sum":
            partial.append(axis)
        elif type(placement) is not Replicate:
            raise ShardingError(f"cannot convert {placement} on axis {axis!r}: a spec can only be Shard, Replicate or a sum")
    return P(*(tuple(axes) for axes in dims), partial=tuple(partial))


def wrap(local: Tensor, spec: P, mesh: Mesh, device_mesh: DeviceMesh) -> DTensor:
    """The DTensor whose shard on this rank is `local`; no communication and no copy."""
    return DTensor.from_local(local, device_mesh, to_placements(spec, mesh), run_check=False)


def to_local(x: DTensor, mesh: Mesh) -> tuple[Tensor, P]:
    """This rank's shard and the spec of `x`.

    Raises MeshError if `x` is on another mesh, ShardingError if its shards are uneven or its placements cannot be a spec.
    """
    if mesh_of(x.device_mesh) != mesh:
        raise MeshError(f"a DTensor {tuple(x.shape)} is on {mesh_of(x.device_mesh)}; it was expected on {mesh}")
    spec = from_placements(x.placements, mesh, x.ndim)
    uneven = [dim for dim, size in enumerate(x.shape) if size % mesh.axis_size(spec.dim(dim))]
    if uneven:
        raise ShardingError(f"a DTensor {tuple(x.shape)} by {spec} has uneven shards along dims {uneven} on {mesh}: pad it first")
    return x.to_local(), spec


def mesh_of(device_mesh: DeviceMesh) -> Mesh:
    """The abstract mesh with the names and sizes of `device_mesh`. Raises MeshError if its dims have no names."""
    names = device_mesh.mesh_dim_names
    if names is None:
        raise MeshError(f"{device_mesh} has no names for its dims; make it with mesh.bind(), or with mesh_dim_names=")
    return Mesh(**dict(zip(names, device_mesh.mesh.shape, strict=True)))
