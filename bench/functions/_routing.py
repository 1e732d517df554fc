"""Routers of mixtures of experts. A choice among experts that are split over ranks needs the few logits of each token."""

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.functions._case import Function, fixed, real

__all__ = ["ROUTING"]


def topk_router(x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """The two most probable experts with weights that sum to 1."""
    weights, chosen = torch.softmax(x @ gate, dim=-1).topk(2, dim=-1)
    return weights / weights.sum(-1, keepdim=True), chosen


def masked_router(x: Tensor, gate: Tensor) -> Tensor:
    """Probabilities of all experts, 0 for those that are not chosen."""
    logits = x @ gate
    top, chosen = logits.topk(2, dim=-1)
    return torch.full_like(logits, float("-inf")).scatter(-1, chosen, top).softmax(-1)


def dispatch_by_capacity(x: Tensor, logits: Tensor) -> Tensor:
    """As in GShard: each expert takes the first four tokens of each sequence that want it."""
    gate, expert = logits.softmax(-1).max(-1)
    wanted = F.one_hot(expert, logits.shape[-1])
    position = (wanted.cumsum(1) - 1) * wanted
    kept = wanted * (position < 4)
    slot = F.one_hot((position * kept).sum(-1), 4).to(x.dtype)
    dispatch = torch.einsum("bse,bsc->bsec", kept.to(x.dtype), slot)
    return torch.einsum("bsec,bsd->becd", dispatch * gate[..., None, None], x)


def load_balance_loss(logits: Tensor) -> Tensor:
    """As in Switch: the share of tokens of each expert times its mean probability."""
    probabilities = logits.softmax(-1)
    chosen = probabilities.topk(2, dim=-1).indices
    share = F.one_hot(chosen, logits.shape[-1]).to(logits.dtype).sum(2).mean((0, 1))
    return logits.shape[-1] * (share * probabilities.mean((0, 1))).sum()


def expert_choice(x: Tensor, gate: Tensor) -> Tensor:
    """Each expert takes the four tokens of each sequence that suit it best."""
    scores = (x @ gate).softmax(-1).transpose(1, 2)
    weights, tokens = scores.topk(4, dim=-1)
    index = tokens[..., None].expand(-1, -1, -1, x.shape[-1])
    rows = x[:, None].expand(-1, scores.shape[1], -1, -1).gather(2, index)
    return rows * weights[..., None]


def soft_moe(x: Tensor, slots: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Every slot of every expert takes a mean of all tokens, and every token a mean of all slots."""
    logits = torch.einsum("bsd,edp->bsep", x, slots)
    dispatch = logits.softmax(1)
    combine = logits.flatten(2).softmax(-1).view_as(logits)
    rows = torch.einsum("bsep,bsd->bepd", dispatch, x)
    rows = torch.einsum("bepo,eod->bepd", F.gelu(torch.einsum("bepd,edo->bepo", rows, up)), down)
    return torch.einsum("bsep,bepd->bsd", combine, rows)


def sinkhorn_router(logits: Tensor) -> Tensor:
    """An assignment in which tokens and experts of each sequence are used evenly."""
    for _ in range(3):
        logits = logits - logits.logsumexp(1, keepdim=True)
        logits = logits - logits.logsumexp(2, keepdim=True)
    return logits.exp()


def group_limited_router(x: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    """As in DeepSeek-V3: the best two of four groups, then the best three experts of these."""
    scores = torch.sigmoid(x @ gate)
    groups = (scores + bias).unflatten(-1, (4, -1))
    best = groups.topk(2, dim=-1).values.sum(-1).topk(2, dim=-1).indices
    allowed = torch.zeros_like(groups[..., 0]).scatter(-1, best, 1.0)
    biased = groups.masked_fill(allowed[..., None] == 0, float("-inf")).flatten(-2)
    chosen = biased.topk(3, dim=-1).indices
    weights = scores.gather(-1, chosen)
    return torch.zeros_like(scores).scatter(-1, chosen, weights / weights.sum(-1, keepdim=True))


_X, _GATE, _LOGITS = real("batch seq embed"), real("embed experts"), real("batch seq experts")
_CHOICE = {"tp": ("the two largest logits of each shard", "their indices")}

ROUTING = (
    Function(topk_router, (_X, _GATE), _CHOICE),
    Function(masked_router, (_X, _GATE), _CHOICE),
    Function(dispatch_by_capacity, (_X, _LOGITS), {**_CHOICE, "sp": ("how many tokens of each shard want an expert",)}),
    Function(load_balance_loss, (_LOGITS,), _CHOICE),
    Function(expert_choice, (_X, _GATE), {"sp": ("scores", "tokens")}),
    Function(soft_moe, (_X, real("experts embed slots"), real("experts embed out"), real("experts out embed"))),
    Function(sinkhorn_router, (_LOGITS,)),
    Function(group_limited_router, (_X, _GATE, fixed("experts")), {"tp": ("scores", "bias")}),
)
