"""Gathers parameters: from the shards that ranks train to whole tensors on every rank, for a sampler that is not sharded."""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mpar.models import shard_slices
from mpar.program import Leaf, Program
from mpar.train._state import PARAMS

__all__ = ["gathered_params"]


def gathered_params(program: Program, rank: int, shards: Mapping[str, Tensor], paths: Sequence[str]) -> dict[str, Tensor]:
    """The parameters at these paths, global, on every rank. All ranks of the process group call this together.

    shards: those of this rank, by path. Every distinct shard is broadcast once, by the first rank that has it.
    """
    found: dict[str, Tensor] = {}
    like = next(iter(shards.values()))
    leaves = {leaf.path: leaf for leaf in program.state_in}
    for path in paths:
        leaf = leaves[f"{PARAMS}{path}"]
        found[path] = torch.empty(leaf.shape, dtype=leaf.dtype, device=like.device)
        for owner, slices in _owners(program, leaf):
            here = found[path][slices]
            piece = shards[path].contiguous() if owner == rank else torch.empty_like(here, memory_format=torch.contiguous_format)
            dist.broadcast(piece, owner)
            here.copy_(piece)
    return found


def _owners(program: Program, leaf: Leaf) -> Iterator[tuple[int, tuple[slice, ...]]]:
    """For each distinct shard of a leaf the first rank that has it, and which elements it is."""
    seen = set()
    for rank in range(program.mesh.size):
        if any(other.path == leaf.path for other in program.part(rank).state_in):
            slices = tuple(shard_slices(leaf.shape, leaf.spec, program.mesh, rank))
            key = tuple((part.start, part.stop) for part in slices)
            if key not in seen:
                seen.add(key)
                yield rank, slices
