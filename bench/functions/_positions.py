"""Positions. What depends on the position alone is computed by every rank for its own positions."""

import math

import torch
from torch import Tensor

from bench.functions._case import Function, real

__all__ = ["POSITIONS"]


def rope_by_halves(x: Tensor) -> Tensor:
    """As in Hugging Face's Llama: the second half of a head is turned into the first."""
    angles = _angles(x)
    cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


def rope_interleaved(x: Tensor) -> Tensor:
    """As in GPT-J: neighbours are a pair."""
    angles = _angles(x)[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()], -1).flatten(-2)


def rope_complex(x: Tensor) -> Tensor:
    """As in Meta's Llama: a product of complex numbers."""
    angles = _angles(x)
    turn = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn[:, None]).flatten(-2)


def relative_bias(scores: Tensor, table: Tensor) -> Tensor:
    """As in T5: a learned bias for each head and bucket of distances."""
    query, key = torch.arange(scores.shape[2]), torch.arange(scores.shape[3])
    distance = (query[:, None] - key[None, :]).clamp(min=0)
    large = 4 + (torch.log(distance.clamp(min=1) / 4) / math.log(4) * 4).long()
    bucket = torch.where(distance < 4, distance, large.clamp(max=table.shape[0] - 1))
    return (scores + table[bucket].permute(2, 0, 1)).softmax(-1)


def sinusoidal(x: Tensor) -> Tensor:
    """As in the first transformer: sines and cosines are added."""
    position = torch.arange(x.shape[1], dtype=x.dtype)[:, None]
    rate = torch.exp(-math.log(10_000.0) * torch.arange(0, x.shape[2], 2, dtype=x.dtype) / x.shape[2])
    table = torch.stack([(position * rate).sin(), (position * rate).cos()], dim=-1).flatten(1)
    return x * math.sqrt(x.shape[2]) + table


def _angles(x: Tensor) -> Tensor:
    """The angle of each position and pair of a head of `x` (batch, seq, heads, head)."""
    rate = 10_000.0 ** (-torch.arange(0, x.shape[-1], 2, dtype=x.dtype) / x.shape[-1])
    return torch.outer(torch.arange(x.shape[1], dtype=x.dtype), rate)


_HEADS = real("batch seq heads head")

POSITIONS = (
    Function(rope_by_halves, (_HEADS,)),
    Function(rope_interleaved, (_HEADS,)),
    Function(rope_complex, (_HEADS,)),
    Function(relative_bias, (real("batch heads seq keys"), real("buckets heads"))),
    Function(sinusoidal, (real("batch seq hidden"),)),
)
