"""Attention written by hand. Queries need all keys and values, so these are gathered where the sequence is split."""

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.functions._case import Function, bits, real

__all__ = ["ATTENTION"]


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention under a triangular mask."""
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    mask = torch.triu(torch.ones(scores.shape[-2:], dtype=torch.bool), diagonal=1)
    return scores.masked_fill(mask, float("-inf")).softmax(-1) @ v


def padded_attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """Attention that does not see padding."""
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
    scores = torch.where(keep[:, None, None, :], scores, torch.finfo(scores.dtype).min)
    return torch.einsum("bhqk,bhkd->bhqd", torch.softmax(scores, dim=-1), v)


def grouped_query_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every head of keys serves several heads of queries."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    return causal_attention(q, k, v)


def alibi_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A penalty that grows with distance, at another rate in each head."""
    heads, length = q.shape[1], q.shape[2]
    slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1, dtype=q.dtype) / heads)
    position = torch.arange(length, dtype=q.dtype)
    distance = position[None, :] - position[:, None]
    scores = q @ k.mT / q.shape[-1] ** 0.5 + slopes[:, None, None] * distance
    scores = scores.masked_fill(distance > 0, float("-inf"))
    return scores.softmax(-1) @ v


def sliding_window_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each position sees itself and the three before it."""
    position = torch.arange(q.shape[2])
    distance = position[:, None] - position[None, :]
    allowed = (distance >= 0) & (distance < 4)
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~allowed, float("-inf"))
    return F.softmax(scores, dim=-1) @ v


def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's own function."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention by feature maps: the sums over keys are small, so nothing else has to travel."""
    q, k = F.elu(q) + 1, F.elu(k) + 1
    state = torch.einsum("bhkd,bhke->bhde", k, v)
    total = torch.einsum("bhqd,bhd->bhq", q, k.sum(2))
    return torch.einsum("bhqd,bhde->bhqe", q, state) / total[..., None]


def attention_with_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    """A learned logit in each head takes the probability that no key should have."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    extra = sink[None, :, None, None].expand(q.shape[0], -1, q.shape[2], 1)
    probabilities = torch.cat([scores, extra], dim=-1).softmax(-1)
    return probabilities[..., :-1] @ v


def talking_heads(q: Tensor, k: Tensor, v: Tensor, mix: Tensor) -> Tensor:
    """Scores of all heads are mixed before the softmax."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    scores = torch.einsum("bhqk,hg->bgqk", scores, mix)
    return torch.einsum("bgqk,bgkd->bgqd", scores.softmax(-1), v)


_QUERIES, _KEYS = real("batch heads seq head"), real("batch kv_heads seq head")
_QKV = (_QUERIES, _QUERIES, _QUERIES)
_ALL_KEYS = {"sp": ("keys", "values")}

ATTENTION = (
    Function(causal_attention, _QKV, _ALL_KEYS),
    Function(padded_attention, (*_QKV, bits("batch seq")), {"sp": ("keys", "values", "mask")}),
    Function(grouped_query_attention, (_QUERIES, _KEYS, _KEYS), _ALL_KEYS),
    Function(alibi_attention, _QKV, _ALL_KEYS),
    Function(sliding_window_attention, _QKV, _ALL_KEYS),  # written with a mask, it computes all pairs
    Function(scaled_dot_product_attention, _QKV, _ALL_KEYS),
    Function(linear_attention, _QKV),
    Function(attention_with_sink, (*_QKV, real("heads")), _ALL_KEYS),
    # over tp each rank has its heads' part of every mixed score: a reduce_scatter
    Function(talking_heads, (*_QKV, real("heads heads_out")), _ALL_KEYS, {"tp": ("the gradient of mixed scores",)}),
)
