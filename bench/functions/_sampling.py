"""What comes after the logits, and dropout. To sort a split vocabulary is to gather it; the k largest need k of each shard."""

import torch
from torch import Tensor

from bench.functions._case import Function, distinct, fixed, integers, real
from mpar import ops

__all__ = ["SAMPLING"]


def top_k_filter(logits: Tensor) -> Tensor:
    """All but the ten largest logits are excluded."""
    smallest = logits.topk(10, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < smallest, float("-inf")).softmax(-1)


def top_p_filter(logits: Tensor) -> Tensor:
    """The most probable tokens that together have 90 % are kept."""
    ordered, order = logits.sort(dim=-1, descending=True)
    p = ordered.softmax(-1)
    excluded = p.cumsum(-1) - p > 0.9
    return logits.masked_fill(excluded.scatter(-1, order, excluded), float("-inf")).softmax(-1)


def min_p_filter(logits: Tensor) -> Tensor:
    """Tokens with less than a tenth of the largest probability are excluded."""
    p = logits.softmax(-1)
    p = torch.where(p < 0.1 * p.amax(-1, keepdim=True), 0.0, p)
    return p / p.sum(-1, keepdim=True)


def repetition_penalty(logits: Tensor, history: Tensor) -> Tensor:
    """Tokens that were generated before become less likely."""
    score = logits.gather(-1, history)
    return logits.scatter(-1, history, torch.where(score < 0, score * 1.2, score / 1.2))


def beam_step(logits: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The best continuations of all beams."""
    total = scores[..., None] + logits.log_softmax(-1)
    best, index = total.flatten(1).topk(scores.shape[1], dim=-1)
    return best, index // logits.shape[-1], index % logits.shape[-1]


def dropout(x: Tensor, key: Tensor, weight: Tensor) -> Tensor:
    """A residual branch with dropout."""
    return x + ops.dropout(x * weight, 0.25, key)


_LOGITS = real("batch vocab")

SAMPLING = (
    Function(top_k_filter, (_LOGITS,), {"tp": ("the ten largest of each shard",)}),
    Function(top_p_filter, (_LOGITS,), {"tp": ("logits",)}),
    Function(min_p_filter, (_LOGITS,)),
    Function(repetition_penalty, (_LOGITS, distinct("batch history", below="vocab"))),
    Function(beam_step, (fixed("batch beams vocab"), fixed("batch beams")), {"tp": ("the best of each shard", "their indices")}),
    Function(dropout, (real("batch seq hidden"), integers("two", below="vocab"), real("hidden"))),
)
