"""Initial values of those parameters of a Mamba-2 mixer whose names do not decide how they start (see `Part.init`)."""

import math

import torch
from torch import Tensor

from mpar import ops
from mpar.models.layers.mamba._config import MambaConfig

__all__ = ["init_mamba_leaf"]


def init_mamba_leaf(config: MambaConfig, field: str, key: ops.Key, bounds: list[range], dtype: torch.dtype) -> Tensor | None:
    """The elements within `bounds` of a fresh leaf, or None if the name of the leaf decides how it starts.

    Head n = 1, 2, ... starts with the decay exp(-dt n), and with a time step dt as `dt_range` says. The taps of the convolution
    and the output projection are uniform in [-r, r], as torch initialises such layers: r is 1 / sqrt(n) if each result is a sum
    of n products. The output projection is also multiplied by `out_scale`.
    """
    sizes, starts = [len(bound) for bound in bounds], [bound.start for bound in bounds]
    if field == "a_log_N":
        return torch.arange(starts[0] + 1, starts[0] + 1 + sizes[0], dtype=torch.float64).log().to(dtype)
    if field == "skip_N":
        return torch.ones(sizes, dtype=dtype)
    if field == "dt_bias_N":
        low, high = (math.log(bound) for bound in config.dt_range)
        dt = (ops.random_uniform(key, sizes, starts=starts).double() * (high - low) + low).exp().clamp(min=config.dt_floor)
        return (dt + torch.log(-torch.expm1(-dt))).to(dtype)  # the inverse of softplus
    if field in ("conv_x_NHW", "conv_b_GKW", "conv_c_GKW", "out_NHD"):
        inner = config.num_heads * config.head_size
        bound = config.out_scale / math.sqrt(inner) if field == "out_NHD" else 1 / math.sqrt(config.conv_width)
        return ((2 * ops.random_uniform(key, sizes, starts=starts).double() - 1) * bound).to(dtype)
    return None
