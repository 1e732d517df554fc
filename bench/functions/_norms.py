"""Normalisations. Statistics over a split dim are sums of what the ranks have: nothing is gathered."""

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.functions._case import Function, fixed, real

__all__ = ["NORMS"]


def layer_norm_by_hand(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    """Mean, variance, scale and shift."""
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + 1e-5) * gain + bias


def layer_norm(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    """torch's own function."""
    return F.layer_norm(x, x.shape[-1:], gain, bias)


def rms_norm_by_hand(x: Tensor, gain: Tensor) -> Tensor:
    """As in the published Llama code."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * gain


def group_norm(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    """Eight groups of channels of an image."""
    return F.group_norm(x, 8, gain, bias)


def batch_norm_by_hand(x: Tensor, gain: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics over batch and sequence, which are returned for running averages."""
    variance, mean = torch.var_mean(x, dim=(0, 1), unbiased=False)
    return (x - mean) * torch.rsqrt(variance + 1e-5) * gain + bias, mean, variance


def batch_norm(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    """torch's own function, in training."""
    return F.batch_norm(x, None, None, gain, bias, training=True)


def standardise(x: Tensor) -> Tensor:
    """Every feature gets mean 0 and deviation 1 along the sequence."""
    return (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-5)


def weight_norm(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Columns of a weight have norm `scale`, of order 3."""
    unit = weight / torch.linalg.vector_norm(weight, ord=3, dim=0, keepdim=True)
    return x @ (unit * scale)


def spectral_norm(weight: Tensor, u: Tensor) -> Tensor:
    """A weight over its largest singular value, by two rounds of power iteration."""
    for _ in range(2):
        v = F.normalize(weight.T @ u, dim=0)
        u = F.normalize(weight @ v, dim=0)
    return weight / torch.dot(u, weight @ v)


_X, _GAIN, _IMAGE = real("batch seq hidden"), real("hidden"), real("batch channels height width")

NORMS = (
    Function(layer_norm_by_hand, (_X, _GAIN, _GAIN)),
    Function(layer_norm, (_X, _GAIN, _GAIN)),
    Function(rms_norm_by_hand, (_X, _GAIN)),
    Function(group_norm, (_IMAGE, real("channels"), real("channels"))),
    Function(batch_norm_by_hand, (_X, _GAIN, _GAIN)),
    Function(batch_norm, (_IMAGE, real("channels"), real("channels"))),
    Function(standardise, (_X,)),
    Function(weight_norm, (real("batch seq embed"), real("embed mlp"), real("mlp"))),
    Function(spectral_norm, (real("hidden embed"), fixed("hidden"))),
)
