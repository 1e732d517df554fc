"""Top-k router: chooses the experts of each token, and their weights.

It can have softmax over all experts or over the chosen ones (Jiang et al. 2024, arXiv:2401.04088), sigmoid scores and groups of
experts (DeepSeek-AI 2024, arXiv:2412.19437), and a bias that changes the choice but not the weights (Wang et al. 2024,
arXiv:2408.15664).
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from mpar.errors import ConfigError, DtypeError, ShapeError
from mpar.ops.primitive import Cost, Primitive

__all__ = ["ROUTER_TINY", "RouterOrder", "RouterScore", "topk_router"]

RouterScore = Literal["softmax", "sigmoid"]
RouterOrder = Literal["pre", "post"]
ROUTER_TINY = 1e-20
"""Added to the sum of weights before dividing by it, because sigmoid scores may all be zero."""

_PARAMS = {
    "k": "int",
    "score": "str",
    "normalise": "bool",
    "order": "str",
    "groups": "int",
    "groups_kept": "int",
    "group_best": "int",
    "scale": "float",
}
topk_router_p = Primitive("topk_router", "logits, bias? -> weights, experts, scores", **_PARAMS)


def topk_router(
    logits: Tensor,
    bias_E: Tensor | None = None,
    *,
    k: int,
    score: RouterScore = "softmax",
    normalise: bool = True,
    order: RouterOrder = "pre",
    groups: int = 1,
    groups_kept: int = 1,
    group_best: int = 2,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(weights, experts, scores)` of `logits` (..., E): the `k` experts of each token, best first, and their weights.

    `weights` and `experts` are (..., k). `scores` (..., E) is `score` of the logits over all experts. With order "pre" the choice
    is made by scores, and the weights are the scores of the chosen experts. With order "post" the choice is made by logits, and
    the weights are `score` of only the chosen logits. `bias_E` is added for the choice, but not to the weights. `groups` > 1
    divides the experts into that many groups of neighbours; experts are then chosen only from the `groups_kept` groups with the
    largest sums of their `group_best` (1 or 2) best values. `normalise` divides the weights by their sum; then they are
    multiplied by `scale`. Of equal values the one of the lowest index is chosen first. NaN counts as -inf in the choice; a token
    with a NaN has NaN weights.

    Weights and scores are float32 or wider, experts int32. Gradients flow into the logits from weights and scores.
    Raises ShapeError, DtypeError or ConfigError if operands or numbers do not fit each other.
    """
    params = {"k": k, "score": score, "normalise": normalise, "order": order, "group_best": group_best}
    return topk_router_p.bind(logits, bias_E, **params, groups=groups, groups_kept=groups_kept, scale=float(scale))


def _check_numbers(num_experts: int, k: int, score: str, order: str, groups: int, groups_kept: int, group_best: int) -> None:
    problems = []
    if not 1 <= k <= num_experts:
        problems.append(f"k is {k}, there are {num_experts} experts: 1 <= k <= {num_experts} is needed")
    if score not in get_args(RouterScore):
        problems.append(f"score is {score!r}; there are {', '.join(get_args(RouterScore))}")
    if order not in get_args(RouterOrder):
        problems.append(f"order is {order!r}; there are {', '.join(get_args(RouterOrder))}")
    if groups < 1 or num_experts % groups:
        problems.append(f"groups is {groups}, which does not divide {num_experts} experts")
    elif not 1 <= groups_kept <= groups or groups_kept * (num_experts // groups) < k:
        kept_groups = f"{groups_kept} of {groups} groups of {num_experts // groups} experts"
        problems.append(f"groups_kept is {groups_kept}: {kept_groups} do not hold k = {k}")
    if group_best not in (1, 2):
        problems.append(f"group_best is {group_best}; it must be 1 or 2")
    if problems:
        raise ConfigError("topk_router:\n" + "\n".join(problems))


@topk_router_p.def_abstract
def _abstract(logits, bias, *, k, score, normalise, order, groups, groups_kept, group_best, scale):
    if logits.ndim < 1 or (bias is not None and bias.shape != logits.shape[-1:]):
        shapes = f"logits are {tuple(logits.shape)}, bias is {None if bias is None else tuple(bias.shape)}"
        raise ShapeError(f"topk_router: {shapes}; they must be (..., E) and (E,)")
    if not logits.is_floating_point() or not (bias is None or bias.is_floating_point()):
        raise DtypeError(f"topk_router: logits are {logits.dtype}, bias is {getattr(bias, 'dtype', None)}; both must be floating")
    _check_numbers(logits.shape[-1], k, score, order, groups, groups_kept, group_best)
    wide = torch.promote_types(logits.dtype, torch.float32)
    weights = torch.empty((*logits.shape[:-1], k), dtype=wide, device=logits.device)
    return weights, torch.empty_like(weights, dtype=torch.int32), torch.empty(logits.shape, dtype=wide, device=logits.device)


@topk_router_p.def_impl
def _impl(logits, bias, *, k, score, normalise, order, groups, groups_kept, group_best, scale):
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).contiguous()
    scores = torch.softmax(wide, -1) if score == "softmax" else torch.sigmoid(wide)
    values = scores if order == "pre" else wide
    experts = _choose(values if bias is None else values + bias.to(wide.dtype), k, groups, groups_kept, group_best)
    weights = _chosen(wide, scores, experts, score, order)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + ROUTER_TINY)
    weights = (weights * scale).masked_fill(wide.isnan().any(-1, keepdim=True), torch.nan)
    return weights, experts.to(torch.int32), scores


def _choose(values: Tensor, k: int, groups: int, groups_kept: int, group_best: int) -> Tensor:
    """Indices of the `k` largest values of each row, from the best groups; of equal values the lowest index comes first."""
    values = values.masked_fill(values.isnan(), -torch.inf)
    by_value = values.sort(dim=-1, descending=True, stable=True).indices
    if groups == 1:
        return by_value[..., :k]
    size = values.shape[-1] // groups
    merit = values.unflatten(-1, (groups, size)).topk(min(group_best, size), -1).values.sum(-1)
    best = merit.masked_fill(merit.isnan(), -torch.inf).sort(dim=-1, descending=True, stable=True).indices[..., :groups_kept]
    left_out = torch.ones_like(merit, dtype=torch.int8).scatter_(-1, best, 0).repeat_interleave(size, -1)
    kept_first = left_out.gather(-1, by_value).sort(dim=-1, stable=True).indices
    return by_value.gather(-1, kept_first[..., :k])


def _chosen(wide: Tensor, scores: Tensor, experts: Tensor, score: str, order: str) -> Tensor:
    if score == "softmax" and order == "post":
        return torch.softmax(wide.gather(-1, experts), -1)
    return scores.gather(-1, experts)


@topk_router_p.def_vjp("logits, experts, scores, dweights, dscores -> dlogits")
def _vjp(logits, experts, scores, dweights, dscores, *, k, score, normalise, order, groups, groups_kept, group_best, scale):
    """Quotient rule for the normalisation, then the derivative of softmax, s (ds - sum(s ds)), or of sigmoid, s (1 - s) ds."""
    experts, dscores = experts.long(), torch.zeros_like(scores) if dscores is None else dscores
    dchosen = torch.zeros_like(scores[..., :k]) if dweights is None else dweights * scale
    chosen = _chosen(logits.to(scores.dtype), scores, experts, score, order)
    if normalise:
        total = chosen.sum(-1, keepdim=True) + ROUTER_TINY
        dchosen = (dchosen - (dchosen * chosen).sum(-1, keepdim=True) / total) / total
    if score == "sigmoid":
        return (scores * (1 - scores) * dscores.scatter_add(-1, experts, dchosen)).to(logits.dtype).contiguous()
    if order == "pre":
        return _softmax_slope(scores, dscores.scatter_add(-1, experts, dchosen)).to(logits.dtype).contiguous()
    dlogits = _softmax_slope(scores, dscores).scatter_add(-1, experts, _softmax_slope(chosen, dchosen))
    return dlogits.to(logits.dtype).contiguous()


def _softmax_slope(p: Tensor, dp: Tensor) -> Tensor:
    return p * (dp - (p * dp).sum(-1, keepdim=True))


topk_router_p.def_sharding("... e, e -> ... k, ... k, ... e", need_replication="e k")
topk_router_p.def_batching_leading()
topk_router_p.bwd.def_sharding("... e, ... k, ... e, ... k, ... e -> ... e", need_replication="e k")
topk_router_p.bwd.def_batching_leading()


@topk_router_p.def_cost
def _cost(logits, bias, *, k, **_):
    return Cost(flops=(5 + k) * logits.numel(), bytes=logits.nbytes + 4 * logits.numel() + 8 * k * logits.shape[:-1].numel())


@topk_router_p.bwd.def_cost
def _cost_bwd(logits, *_, k, **__):
    return Cost(flops=(6 + k) * logits.numel(), bytes=2 * logits.nbytes + 8 * logits.numel() + 8 * k * logits.shape[:-1].numel())
