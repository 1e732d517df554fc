"""Shards: from a global tensor to the shard of a rank, and from the shards of all ranks to the global tensor."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mpar.collectives import fold
from mpar.errors import ShardingError
from mpar.mesh import Mesh
from mpar.spec import P

__all__ = ["assemble", "shard"]


def shard(x: Tensor, spec: P, mesh: Mesh, rank: int) -> Tensor:
    """The shard of `rank` of a global tensor, as a new contiguous tensor. `spec.partial` is ignored."""
    for dim, axes in enumerate(spec.dims):
        size = mesh.axis_size(axes)
        if size > 1:
            length = x.shape[dim] // size
            x = x.narrow(dim, mesh.index(rank, axes) * length, length)
    return x.clone(memory_format=torch.contiguous_format)


def assemble(locals_: Sequence[Tensor], spec: P, mesh: Mesh) -> Tensor:
    """The global tensor of the shards of all ranks. Raises ShardingError if two ranks have different values of the same part."""
    summed = list(locals_)
    for group in mesh.groups(spec.partial) if spec.partial else ():
        total = fold([locals_[rank] for rank in group])
        for rank in group:
            summed[rank] = total
    shape = [n * mesh.axis_size(spec.dim(i)) for i, n in enumerate(summed[0].shape)]
    out = summed[0].new_empty(shape)
    owner: dict[tuple[int, ...], int] = {}
    for rank, local in enumerate(summed):
        place = tuple(mesh.index(rank, axes) for axes in spec.padded(local.ndim))
        window = out
        for dim, (index, n) in enumerate(zip(place, local.shape, strict=True)):
            window = window.narrow(dim, index * n, n)
        if place not in owner:
            owner[place] = rank
            window.copy_(local)
        elif not _same_bits(window, local):
            raise ShardingError(
                f"ranks {owner[place]} and {rank} hold different values of a tensor {tuple(shape)} placed by {spec} on {mesh},\n"
                "where they should hold the same: an op in the function is not deterministic, or the compiler is wrong."
            )
    return out


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | ((a != a) & (b != b))).all())
