"""The router: logits, the choice of experts and their weights, and the bias that balances the choice without a loss.

The bias moves after each step (Wang et al. 2024, arXiv:2408.15664, algorithm 1).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from mpar import ops
from mpar.models.layers.moe._config import MoeConfig
from mpar.models.layers.moe._params import Moe

__all__ = ["TINY", "one_hot", "route", "router_logits", "updated_choice_bias"]

TINY = 1e-20
"""Added to sums of scores before dividing by them."""


def router_logits(params: Moe[Tensor], x_BSD: Tensor) -> Tensor:
    """Logits (B, S, E) in float32 or wider."""
    wide = torch.promote_types(x_BSD.dtype, torch.float32)
    logits_BSE = ops.einsum("bsd,de->bse", x_BSD.to(wide), params.router_DE.to(wide))
    if params.router_bias_E is not None:
        logits_BSE = logits_BSE + params.router_bias_E.to(wide)
    return ops.name(logits_BSE, "router_logits")


def updated_choice_bias(bias_E: Tensor, counts_E: Tensor, rate: float) -> Tensor:
    """The bias after a step in which `counts_E` slots chose each expert.

    It goes up by `rate` for experts with fewer slots than the mean, and down by `rate` for those with more.
    """
    counts_E = counts_E.to(torch.float64)
    return bias_E + rate * torch.sign(counts_E.mean() - counts_E).to(bias_E.dtype)


def route(
    params: Moe[Tensor],
    config: MoeConfig,
    logits_BSE: Tensor,
    routed_BS: Tensor | None,
    context: Mapping[str, Tensor],
    *,
    training: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(weights_BSK, experts_BSK, scores_BSE)`: which experts each token goes to, their weights, the scores of all experts.

    `routed_BS` says which tokens are not padding; None: all. Only in training may the experts of a token depend on other tokens.
    """
    if config.kind == "topk" or not training:
        return ops.topk_router(
            logits_BSE,
            params.choice_bias_E,
            k=config.top_k,
            score=config.score,
            normalise=config.normalise,
            order=config.order,
            groups=config.groups,
            groups_kept=config.groups_kept,
            group_best=config.group_best,
            scale=config.scale,
        )
    scores_BSE = torch.softmax(logits_BSE, -1) if config.score == "softmax" else torch.sigmoid(logits_BSE)
    if config.kind == "balanced":
        experts_BSK = _balanced(config, logits_BSE, context.get("order"))
    else:
        below_BSE = logits_BSE - logits_BSE.amax(-1, keepdim=True)  # the balance stays the same, but exp cannot overflow
        if routed_BS is not None:
            below_BSE = below_BSE.masked_fill(~routed_BS[..., None], float("-inf"))  # padding takes no part in the balance
        balanced_BSE = ops.sinkhorn(below_BSE, groups=config.token_groups)
        _, experts_BSK, _ = ops.topk_router(balanced_BSE, k=config.top_k, order="post")
    return _weights(config, logits_BSE, scores_BSE, experts_BSK), experts_BSK, scores_BSE


def _balanced(config: MoeConfig, logits_BSE: Tensor, order_S: Tensor | None) -> Tensor:
    """Experts (B, S, K): slot i goes to expert i mod E. Slots are numbered by the positions of tokens before any permutation."""
    (B, S, E), K, device = logits_BSE.shape, config.top_k, logits_BSE.device
    order_S = torch.arange(S, device=device) if order_S is None else order_S
    token_BS = torch.arange(B, device=device)[:, None] * S + order_S
    slots_BSK = token_BS[..., None] * K + torch.arange(K, device=device)
    return (slots_BSK % E).to(torch.int32)


def _weights(config: MoeConfig, logits_BSE: Tensor, scores_BSE: Tensor, experts_BSK: Tensor) -> Tensor:
    """The weights that `ops.topk_router` would give these experts."""
    softmax_of_chosen = config.score == "softmax" and config.order == "post"
    chosen_BSKE = one_hot(experts_BSK, config.num_experts)
    values_BSE = logits_BSE if softmax_of_chosen else scores_BSE
    weights_BSK = torch.where(chosen_BSKE, values_BSE[:, :, None], 0.0).sum(-1)
    if softmax_of_chosen:
        weights_BSK = torch.softmax(weights_BSK, -1)
    if config.normalise:
        weights_BSK = weights_BSK / (weights_BSK.sum(-1, keepdim=True) + TINY)
    return weights_BSK * config.scale


def one_hot(experts_BSK: Tensor, num_experts: int) -> Tensor:
    """Whether each slot chose each expert: (B, S, K, E)."""
    return experts_BSK[..., None] == torch.arange(num_experts, device=experts_BSK.device)
