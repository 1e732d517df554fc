"""Loading parameters from a Hugging Face folder: all of them, or the shards of one rank."""

import os
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from mpar import tree
from mpar.errors import ShardingError
from mpar.mesh import Mesh
from mpar.models._model import Model
from mpar.models.decoder import DecoderParams
from mpar.models.hf._reader import HfReader
from mpar.spec import P, check_spec

__all__ = ["load_params", "shard_slices"]


def load_params(
    model: Model,
    folder: str | os.PathLike[str],
    specs: DecoderParams[P] | None = None,
    mesh: Mesh | None = None,
    rank: int = 0,
    dtype: torch.dtype | None = None,
) -> DecoderParams[Tensor]:
    """The parameters in `folder`; with `specs` and `mesh` the local shards of `rank`, and only their bytes are read.

    `dtype` is by default that of `model`. Raises CheckpointError, or ShardingError with all leaves that do not fit `specs`.
    """
    like = model.abstract_params
    paths, dtype = tree.paths(like), dtype or model.dtype
    cuts: list[tuple[slice, ...] | None] = [None] * len(paths)
    if specs is not None:
        if mesh is None:
            raise ShardingError("cannot load shards: specs are given but no mesh; pass mesh=Mesh(...) or leave specs out")
        placed = [tree.get(specs, path) for path in paths]
        shapes = [tuple(leaf.shape) for leaf in tree.leaves(like)]
        problems = [line for triple in zip(paths, shapes, placed, strict=True) for line in check_spec(*triple, mesh)]
        if problems:
            raise ShardingError(f"cannot load shards on {mesh}:\n" + "\n".join(f"  {line}" for line in problems))
        cuts = [shard_slices(shape, spec, mesh, rank) for shape, spec in zip(shapes, placed, strict=True)]
    with HfReader(model, folder) as reader:
        leaves = [reader.read_leaf(path, cut).to(dtype) for path, cut in zip(paths, cuts, strict=True)]
    return cast(DecoderParams[Tensor], tree.unflatten(tree.flatten(like)[1], leaves))


def shard_slices(shape: Sequence[int], spec: P, mesh: Mesh, rank: int) -> tuple[slice, ...]:
    """The slices of a tensor of global `shape` that are the shard of `rank`."""
    slices = []
    for dim, size in enumerate(shape):
        shard_size = size // mesh.axis_size(spec.dim(dim))
        start = shard_size * mesh.index(rank, spec.dim(dim))
        slices.append(slice(start, start + shard_size))
    return tuple(slices)
