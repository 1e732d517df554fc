"""Start: the first values of A and B. Each element depends only on the seed, the path of its leaf, and its global index."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mpar import ops
from mpar.adapters._leaves import AdapterLeaf
from mpar.adapters._lora import LoRA

__all__ = ["start_leaf"]


def start_leaf(lora: LoRA, leaf: AdapterLeaf, dtype: torch.dtype, seed: int, slices: Sequence[slice] | None) -> Tensor:
    """The elements within `slices` (default: all) of a leaf. What begins with values of the model is zero."""
    bounds = [range(size)[cut] for size, cut in zip(leaf.shape, slices or [slice(None)] * len(leaf.shape), strict=True)]
    sizes, starts, key = [len(bound) for bound in bounds], [bound.start for bound in bounds], ops.fold_key(seed, leaf.path)
    embedding = leaf.adapted.matrix.kind == "embedding"
    if embedding and leaf.part == "b":
        return ops.random_normal(key, sizes, starts=starts).to(dtype)
    uniform = (leaf.part == "a" and lora.init in ("kaiming", "random")) or (leaf.part == "b" and lora.init == "random")
    if leaf.part == "magnitude" or embedding or not (uniform or (leaf.part == "a" and lora.init == "gaussian")):
        return torch.zeros(sizes, dtype=dtype)
    if not uniform:
        return (ops.random_normal(key, sizes, starts=starts) / leaf.adapted.rank).to(dtype)
    bound = 1 / math.sqrt(_fan_in(leaf))  # kaiming_uniform with a = sqrt(5), as torch.nn.Linear begins
    return ((ops.random_uniform(key, sizes, starts=starts) * 2 - 1) * bound).to(dtype)


def _fan_in(leaf: AdapterLeaf) -> int:
    """How many numbers an output of A, or of B, is a sum of."""
    sizes = dict(zip(leaf.letters, leaf.shape, strict=True))
    expert = sizes[leaf.letters[0]] if leaf.leaf.expert is not None else 1
    total = math.prod(leaf.shape) // leaf.adapted.rank // expert
    return total if leaf.part == "a" else leaf.adapted.rank * expert
