"""Look-ups, sums by index, and codes. A rank looks up what it has of a split table, and the results are added."""

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.functions._case import Function, bits, fixed, integers, real

__all__ = ["TABLES"]


def padded_embedding(tokens: Tensor, table: Tensor) -> Tensor:
    """Token 0 is padding, whose row gets no gradient."""
    return F.embedding(tokens, table, padding_idx=0)


def tied_head(tokens: Tensor, labels: Tensor, table: Tensor, weight: Tensor) -> Tensor:
    """One table embeds the tokens and predicts the labels."""
    hidden = torch.tanh(table[tokens] @ weight)
    return F.cross_entropy((hidden @ table.T).flatten(0, 1), labels.flatten())


def segment_sum(x: Tensor, segments: Tensor) -> Tensor:
    """The mean of the tokens of each segment."""
    rows, index = x.flatten(0, 1), segments.flatten()
    total = rows.new_zeros(6, rows.shape[1]).index_add(0, index, rows)
    count = rows.new_zeros(6).scatter_add(0, index, torch.ones_like(rows[:, 0]))
    return total / count.clamp(min=1)[:, None]


def histogram(x: Tensor, edges: Tensor) -> Tensor:
    """How many values of each feature lie between edges."""
    bucket = torch.bucketize(x, edges.sort().values)
    return F.one_hot(bucket, edges.shape[0] + 1).sum((0, 1))


def interpolated_table(x: Tensor, table: Tensor) -> Tensor:
    """A function of one number as straight lines between nine learned values."""
    place = torch.sigmoid(x) * (table.shape[0] - 1)
    lower = place.floor().long().clamp(max=table.shape[0] - 2)
    share = place - lower
    return table[lower] * (1 - share) + table[lower + 1] * share


def masked_mean_pool(x: Tensor, keep: Tensor) -> Tensor:
    """As for sentence embeddings: the mean of what is no padding, of length 1."""
    weight = keep[..., None].to(x.dtype)
    return F.normalize((x * weight).sum(1) / weight.sum(1).clamp(min=1e-9), dim=-1)


def nearest_code(x: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """As in VQ-VAE: the nearest code, a gradient that passes straight through, and the loss that commits to it."""
    distance = x.square().sum(-1, keepdim=True) - 2 * x @ codes.T + codes.square().sum(-1)
    code = codes[distance.argmin(-1)]
    commitment = (x - code.detach()).square().mean() + (x.detach() - code).square().mean()
    return x + (code - x).detach(), commitment


def quantise(x: Tensor, weight: Tensor) -> Tensor:
    """Weights as 8-bit integers with a scale for each column, and a product with what they stand for."""
    scale = weight.abs().amax(0, keepdim=True) / 127
    stored = (weight / scale).round().clamp(-127, 127).to(torch.int8)
    return x @ (stored.to(x.dtype) * scale)


_TOKENS, _X = integers("batch seq", below="vocab"), real("batch seq hidden")
_NEAREST = {"tp": ("the smallest distance of each shard", "its index")}

TABLES = (
    Function(padded_embedding, (_TOKENS, real("vocab embed"))),
    Function(tied_head, (_TOKENS, _TOKENS, real("vocab embed"), real("embed embed_out"))),
    Function(segment_sum, (_X, integers("batch seq", below="segments"))),
    Function(histogram, (fixed("batch seq hidden"), fixed("edges"))),
    Function(interpolated_table, (_X, real("grid"))),
    Function(masked_mean_pool, (_X, bits("batch seq"))),
    Function(nearest_code, (real("batch seq embed"), real("vocab embed")), _NEAREST),
    Function(quantise, (real("batch seq hidden"), real("hidden mlp_whole"))),
)
