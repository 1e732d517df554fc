"""Fresh parameters, in parts: every element depends on the seed, its path and its global index alone."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mpar import ops, tree
from mpar.models.decoder._config import DecoderConfig
from mpar.models.decoder._params import axes, shapes
from mpar.models.layers import part_of

__all__ = ["init_leaf"]

INIT_BLOCK = 1 << 22
"""Elements that are drawn at once."""


def init_leaf(
    config: DecoderConfig, dtype: torch.dtype, seed: int, path: str, slices: Sequence[slice] | None = None
) -> Tensor:
    """The part `slices` (default: all) of a fresh leaf at `path`, without making the others.

    The kind of part that the leaf belongs to may say how it starts (`Part.init`). All other matrices are normal with the config's
    initializer_range, gains are one, biases and padding of the vocabulary zero.
    """
    shape, names = tree.get(shapes(config), path), tree.get(axes(config), path)
    bounds = [range(size)[part] for size, part in zip(shape, slices or [slice(None)] * len(shape), strict=True)]
    sizes = [len(bound) for bound in bounds]
    own = _part_leaf(config, dtype, seed, path, bounds)
    if own is not None:
        return own
    field = path.rpartition(".")[2]
    if "bias" in field:
        return torch.zeros(sizes, dtype=dtype)
    if "norm" in field:
        return torch.full(sizes, config.norm.first_gain, dtype=dtype)
    values = _normal(ops.fold_key(seed, path), bounds, dtype).mul_(config.initializer_range)
    if "vocab" in names:
        dim = names.index("vocab")
        real = torch.arange(bounds[dim].start, bounds[dim].stop) < config.vocab_size
        real = real.reshape([-1 if d == dim else 1 for d in range(len(sizes))])
        values.masked_fill_(~real, 0.0)
    return values


def _part_leaf(config: DecoderConfig, dtype: torch.dtype, seed: int, path: str, bounds: list[range]) -> Tensor | None:
    """A fresh leaf if its part says how it starts."""
    keys = path.split(".")
    if keys[0] != "layers":
        return None
    for part_config in config.layers[int(keys[1])].parts:
        part = part_of(part_config)
        if part.field == keys[2] and part.init is not None:
            return part.init(part_config, ".".join(keys[3:]), ops.fold_key(seed, path), bounds, dtype)
    return None


def _normal(key: ops.Key, bounds: Sequence[range], dtype: torch.dtype) -> Tensor:
    """The part within `bounds` of normal numbers, drawn by rows: the generator needs many times its result as workspace."""
    sizes, starts = [len(bound) for bound in bounds], [bound.start for bound in bounds]
    out = torch.empty(sizes, dtype=dtype)
    num_rows = max(1, INIT_BLOCK // max(1, math.prod(sizes[1:])))
    for row in range(0, sizes[0], num_rows):
        part = out[row : row + num_rows]
        part.copy_(ops.random_normal(key, part.shape, starts=[starts[0] + row, *starts[1:]]))
    return out
