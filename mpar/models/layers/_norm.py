"""Norms of the residual stream and of heads, as a config names them."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mpar import ops

__all__ = ["NormConfig", "normalise"]


@dataclass(frozen=True)
class NormConfig:
    """kind: "rms_norm" (arXiv:1910.07467) or "layer_norm". bias: whether it has one; only layer norms can.

    offset: added to the stored gain. Gemma stores each gain minus one, so its offset is 1.
    """

    kind: Literal["rms_norm", "layer_norm"] = "rms_norm"
    eps: float = 1e-6
    bias: bool = False
    offset: float = 0.0

    def __post_init__(self) -> None:
        assert self.kind == "layer_norm" or not self.bias, "RMS norms have no bias"
        assert self.kind == "rms_norm" or not self.offset, "layer norms have plain gains"

    @property
    def first_gain(self) -> float:
        """The stored gain of a fresh model: with the offset it is one."""
        return 1.0 - self.offset


def normalise(config: NormConfig, x: Tensor, weight: Tensor, bias: Tensor | None, label: str) -> Tensor:
    """The norm of the last dim of `x`, named `label`; `weight` and `bias` have one value for each feature."""
    if config.kind == "layer_norm":
        return ops.name(ops.layer_norm(x, weight, bias, eps=config.eps), label)
    if config.offset:  # add in a wide dtype: a small stored gain would be rounded away beside the offset
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32)) + config.offset
    return ops.name(ops.rms_norm(x, weight, eps=config.eps), label)
