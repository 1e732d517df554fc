"""How the parameters of a Mamba-2 mixer start, where their names do not tell it."""

import math

import torch
from torch import Tensor

from mpar import ops
from mpar.models.layers.mamba._config import MambaConfig

__all__ = ["init_mamba_leaf"]


def init_mamba_leaf(config: MambaConfig, field: str, key: ops.Key, bounds: list[range], dtype: torch.dtype) -> Tensor | None:
    """The part within `bounds` of a fresh leaf, or None if it begins as leaves of its kind do elsewhere.

    Decays exp(-dt n) for head n = 1, 2, ...; steps as `dt_range` says; taps and the projection out uniform within the inverse
    root of the number of terms that are added up, as torch begins such layers.
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
