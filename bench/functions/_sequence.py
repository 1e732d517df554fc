"""Along a sequence: shifts, convolutions, windows and scans. Ranks that split it exchange edges, or one total each."""

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.functions._case import Function, real

__all__ = ["SEQUENCE"]


def token_shift(x: Tensor, mix: Tensor) -> Tensor:
    """As in RWKV: every token is mixed with the one before it."""
    before = F.pad(x, (0, 0, 1, 0))[:, :-1]
    return x * mix + before * (1 - mix)


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """As in Mamba: each channel's own filter over four steps."""
    y = F.conv1d(F.pad(x, (weight.shape[-1] - 1, 0)), weight, bias, groups=x.shape[1])
    return F.silu(y)


def depthwise_conv2d(x: Tensor, depth: Tensor, point: Tensor) -> Tensor:
    """A filter for each channel, then a product over channels."""
    y = F.conv2d(x, depth, padding=1, groups=x.shape[1])
    return torch.einsum("bchw,co->bohw", F.relu(y), point)


def chunked_linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal: pairs within a chunk of four, and the sums of all chunks before."""
    q, k, v = (x.unflatten(2, (-1, 4)) for x in (q, k, v))
    state = torch.einsum("bhncd,bhnce->bhnde", k, v)
    before = state.cumsum(2) - state
    pairs = torch.tril(torch.einsum("bhncd,bhnmd->bhncm", q, k))
    return (torch.einsum("bhncm,bhnme->bhnce", pairs, v) + torch.einsum("bhncd,bhnde->bhnce", q, before)).flatten(2, 3)


def gated_recurrence(x: Tensor, gate: Tensor) -> Tensor:
    """h[t] = a[t] h[t - 1] + (1 - a[t]) x[t], by cumulative sums of logarithms."""
    a = torch.sigmoid(gate)
    log_decay = a.log().cumsum(1)
    return log_decay.exp() * ((1 - a) * x * (-log_decay).exp()).cumsum(1)


def moving_average(x: Tensor) -> Tensor:
    """The mean of a position and the three before it."""
    return F.pad(x, (0, 0, 3, 0)).unfold(1, 4, 1).mean(-1)


def patchify(image: Tensor, weight: Tensor) -> Tensor:
    """As in vision transformers: squares of 2 by 2 become tokens."""
    patches = image.unflatten(2, (-1, 2)).unflatten(4, (-1, 2)).permute(0, 2, 4, 1, 3, 5)
    return patches.flatten(3).flatten(1, 2) @ weight


def shifted_windows(x: Tensor, weight: Tensor) -> Tensor:
    """As in Swin: windows of four, moved by two, mixed within, and moved back."""
    windows = torch.roll(x, -2, dims=1).unflatten(1, (-1, 4))
    mixed = torch.einsum("bnwd,wv->bnvd", windows, weight)
    return x + torch.roll(mixed.flatten(1, 2), 2, dims=1)


def pool_and_repeat(x: Tensor, weight: Tensor) -> Tensor:
    """Half as many positions, and back."""
    short = F.avg_pool1d(x.transpose(1, 2), 2).transpose(1, 2)
    long = (short * weight).repeat_interleave(2, dim=1)
    return x + long


_X, _HEADS, _IMAGE = real("batch seq hidden"), real("batch heads seq head"), real("batch channels height width")

SEQUENCE = (
    Function(
        token_shift, (_X, real("hidden")), {"sp": ("the last row of each shard",)}, {"sp": ("the first cotangent of each",)}
    ),
    Function(causal_conv1d, (real("batch channels seq"), real("channels one kernel"), real("channels"))),
    Function(depthwise_conv2d, (_IMAGE, real("channels one kernel_h kernel_w"), real("channels out"))),
    Function(
        chunked_linear_attention,
        (_HEADS, _HEADS, _HEADS),
        {"sp": ("the total of each shard's chunks",)},
        {"sp": ("the total of each shard's cotangents",)},
    ),
    Function(
        gated_recurrence,
        (_X, _X),
        {"sp": ("the decay of each shard", "the total of each shard")},
        {"sp": ("the totals of the cotangents of both sums",) * 2},
    ),
    Function(moving_average, (_X,)),
    Function(patchify, (real("batch rgb height width"), real("hidden_in hidden"))),
    Function(shifted_windows, (_X, real("kernel kernel_out"))),
    Function(pool_and_repeat, (_X, real("hidden"))),
)
