"""Fresh parameters: any elements of any leaf, since each depends only on the seed, the path of its leaf and its global index."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mpar import ops, tree
from mpar.models._init import normal
from mpar.models.decoder._config import DecoderConfig
from mpar.models.decoder._params import axes, shapes
from mpar.models.layers import part_of

__all__ = ["init_leaf"]


def init_leaf(config: DecoderConfig, dtype: torch.dtype, seed: int, path: str, slices: Sequence[slice] | None = None) -> Tensor:
    """The elements within `slices` (default: all) of a fresh leaf at `path`; no others are made.

    The part that the leaf belongs to may say how it starts (`Part.init`). All other matrices are normal with the config's
    initializer_range, gains are one, biases and the padding of the vocabulary are zero.
    """
    shape, names = tree.get(shapes(config), path), tree.get(axes(config), path)
    bounds = [range(size)[cut] for size, cut in zip(shape, slices or [slice(None)] * len(shape), strict=True)]
    sizes = [len(bound) for bound in bounds]
    part_leaf = _part_leaf(config, dtype, seed, path, bounds)
    if part_leaf is not None:
        return part_leaf
    field = path.rpartition(".")[2]
    if "bias" in field:
        return torch.zeros(sizes, dtype=dtype)
    if "norm" in field:
        return torch.full(sizes, config.norm.first_gain, dtype=dtype)
    values = normal(ops.fold_key(seed, path), bounds, dtype).mul_(config.initializer_range)
    if "vocab" in names:
        dim = names.index("vocab")
        real = torch.arange(bounds[dim].start, bounds[dim].stop) < config.vocab_size
        real = real.reshape([-1 if d == dim else 1 for d in range(len(sizes))])
        values.masked_fill_(~real, 0.0)
    return values


def _part_leaf(config: DecoderConfig, dtype: torch.dtype, seed: int, path: str, bounds: list[range]) -> Tensor | None:
    """The elements within `bounds` of a fresh leaf, if its part has an `init` that makes them; else None."""
    keys = path.split(".")
    if keys[0] != "layers":
        return None
    for part_config in config.layers[int(keys[1])].parts:
        part = part_of(part_config)
        if part.field == keys[2] and part.init is not None:
            return part.init(part_config, ".".join(keys[3:]), ops.fold_key(seed, path), bounds, dtype)
    return None
