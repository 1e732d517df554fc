"""Mixture of experts: a router chooses a few feed-forward layers for each token (Shazeer et al. 2017, arXiv:1701.06538).

Losses that balance the load: Switch (Fedus et al. 2021, arXiv:2101.03961, eq. 4-6), per sequence (DeepSeek-AI 2024,
arXiv:2412.19437, eq. 17-20), of the router's logits (Zoph et al. 2022, arXiv:2202.08906, eq. 5); without a loss: a bias that
moves the choice after each step (Wang et al. 2024, arXiv:2408.15664, algorithm 1).
"""

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from mpar import ops
from mpar.models.layers._feed_forward import ACTIVATIONS, FEED_FORWARD_AXES, FeedForward, mlp, mlp_shapes
from mpar.models.layers.moe._config import ROUTER_OPTIONS, MoeConfig, with_router_options
from mpar.ops._token_groups import group_sizes
from mpar.tree import struct

__all__ = [
    "MOE_AXES",
    "ROUTER_OPTIONS",
    "Moe",
    "MoeConfig",
    "moe",
    "moe_shapes",
    "router_logits",
    "updated_choice_bias",
    "with_router_options",
]

TINY = 1e-20
"""Added to sums of scores that something is divided by."""

TOKENS = ("moe_batch", "moe_seq", "embed")
RESIDUAL = ("batch", "residual_seq", "embed")


@struct
class Moe:
    """The router's matrix, the experts' matrices, the shared layer; what a config does not ask for is None."""

    router_DE: Tensor
    gate_EDF: Tensor
    up_EDF: Tensor
    down_EFD: Tensor
    router_bias_E: Tensor | None = None
    choice_bias_E: Tensor | None = None
    gate_bias_EF: Tensor | None = None
    up_bias_EF: Tensor | None = None
    down_bias_ED: Tensor | None = None
    shared: FeedForward | None = None
    shared_gate_D1: Tensor | None = None


MOE_AXES = cast(Any, Moe)(
    router_DE=("embed", None),
    gate_EDF=("expert", "embed", "expert_mlp"),
    up_EDF=("expert", "embed", "expert_mlp"),
    down_EFD=("expert", "expert_mlp", "embed"),
    router_bias_E=(None,),
    choice_bias_E=(None,),
    gate_bias_EF=("expert", "expert_mlp"),
    up_bias_EF=("expert", "expert_mlp"),
    down_bias_ED=("expert", "embed"),
    shared=FEED_FORWARD_AXES,
    shared_gate_D1=("embed", None),
)


def moe_shapes(config: MoeConfig, hidden_size: int) -> Moe:
    """The parameters with a tuple of sizes for each leaf."""
    E, D, F = config.num_experts, hidden_size, config.mlp_size
    return cast(Any, Moe)(
        router_DE=(D, E),
        gate_EDF=(E, D, F),
        up_EDF=(E, D, F),
        down_EFD=(E, F, D),
        router_bias_E=(E,) if config.router_bias else None,
        choice_bias_E=(E,) if config.choice_bias else None,
        gate_bias_EF=(E, F) if config.mlp_bias else None,
        up_bias_EF=(E, F) if config.mlp_bias else None,
        down_bias_ED=(E, D) if config.mlp_bias else None,
        shared=None if config.shared is None else mlp_shapes(config.shared, D),
        shared_gate_D1=(D, 1) if config.shared_gate else None,
    )


def moe(
    params: Moe, config: MoeConfig, x_BSD: Tensor, context: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """`(y_BSD, losses, metrics)`. Tokens of document -1 (padding) go to no expert and count in no loss.

    losses:  side losses times their coefficient and times context["weight"], which all losses of a batch are divided by; none
             where the context has no weight. aux_loss is E * sum over experts of (slots / tokens) * (mean score), as in
             transformers, for one layer; seq_aux_loss the mean over rows of the same, divided by top_k; z_loss the mean square
             of the logits' log-sum-exp. Scores are normalised to sum 1. global_aux_loss is aux_loss over the whole step.
    metrics: expert_counts (E,): the slots that chose each expert; with a capacity dropped (): the slots that did not fit.
    """
    if "weight" in context:
        group_sizes("a layer of experts", x_BSD.shape, config.token_groups)
    tokens_BSD = ops.constrain(x_BSD, TOKENS)
    logits_BSE = router_logits(params, tokens_BSD)
    documents_BS = context.get("documents")
    routed_BS = None if documents_BS is None else documents_BS != -1
    weights_BSK, experts_BSK, scores_BSE = _route(params, config, logits_BSE, routed_BS, context)
    if routed_BS is not None:
        experts_BSK = experts_BSK.masked_fill(~routed_BS[..., None], -1)
    counts_E = ops.expert_counts(experts_BSK, num_experts=config.num_experts)
    metrics = {"expert_counts": counts_E}
    losses: dict[str, Tensor] = {}
    if "weight" in context:
        losses = _losses(config, logits_BSE, scores_BSE, experts_BSK, counts_E, routed_BS, context["weight"])
    padded = False
    if config.capacity_factor is not None and "weight" in context:
        kept_BSK = ops.limit_capacity(
            experts_BSK,
            weights_BSK,
            context.get("order"),
            num_experts=config.num_experts,
            capacity=_capacity(config, x_BSD),
            groups=config.token_groups,
        )
        padded = config.padded
        metrics["dropped"] = (experts_BSK != kept_BSK).sum()
        experts_BSK = kept_BSK
    apply = _padded if padded else _grouped if config.grouped else _sequential
    y_BSD, shared_BSD = apply(params, config, tokens_BSD, x_BSD, experts_BSK, weights_BSK, context)
    return ops.name(y_BSD if shared_BSD is None else y_BSD + shared_BSD, "mlp_out"), losses, metrics


def router_logits(params: Moe, x_BSD: Tensor) -> Tensor:
    """Logits (B, S, E) in float32 or wider."""
    wide = torch.promote_types(x_BSD.dtype, torch.float32)
    logits_BSE = ops.einsum("bsd,de->bse", x_BSD.to(wide), params.router_DE.to(wide))
    if params.router_bias_E is not None:
        logits_BSE = logits_BSE + params.router_bias_E.to(wide)
    return ops.name(logits_BSE, "router_logits")


def updated_choice_bias(bias_E: Tensor, counts_E: Tensor, rate: float) -> Tensor:
    """The bias after a step in which `counts_E` slots chose each expert: up by `rate` where they are fewer than the mean."""
    counts_E = counts_E.to(torch.float64)
    return bias_E + rate * torch.sign(counts_E.mean() - counts_E).to(bias_E.dtype)


def _capacity(config: MoeConfig, x_BSD: Tensor) -> int:
    """Slots of an expert in a group of tokens."""
    return config.capacity(x_BSD.shape[0] * x_BSD.shape[1] // math.prod(config.token_groups))


def _route(
    params: Moe, config: MoeConfig, logits_BSE: Tensor, routed_BS: Tensor | None, context: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """`(weights_BSK, experts_BSK, scores_BSE)`."""
    if config.kind == "topk" or "weight" not in context:
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
        below_BSE = logits_BSE - logits_BSE.amax(-1, keepdim=True)  # changes nothing but that exp cannot overflow
        if routed_BS is not None:
            below_BSE = below_BSE.masked_fill(~routed_BS[..., None], float("-inf"))  # padding takes no part in the balance
        balanced_BSE = ops.sinkhorn(below_BSE, groups=config.token_groups)
        _, experts_BSK, _ = ops.topk_router(balanced_BSE, k=config.top_k, order="post")
    return _weights(config, logits_BSE, scores_BSE, experts_BSK), experts_BSK, scores_BSE


def _balanced(config: MoeConfig, logits_BSE: Tensor, order_S: Tensor | None) -> Tensor:
    """Slot i to expert i mod E, counted by the tokens' places before any permutation: (B, S, K)."""
    (B, S, E), K, device = logits_BSE.shape, config.top_k, logits_BSE.device
    order_S = torch.arange(S, device=device) if order_S is None else order_S
    token_BS = torch.arange(B, device=device)[:, None] * S + order_S
    slots_BSK = token_BS[..., None] * K + torch.arange(K, device=device)
    return (slots_BSK % E).to(torch.int32)


def _weights(config: MoeConfig, logits_BSE: Tensor, scores_BSE: Tensor, experts_BSK: Tensor) -> Tensor:
    """What `ops.topk_router` would weigh these experts."""
    alone = config.score == "softmax" and config.order == "post"
    chosen_BSKE = _one_hot(experts_BSK, config.num_experts)
    values_BSE = logits_BSE if alone else scores_BSE
    weights_BSK = torch.where(chosen_BSKE, values_BSE[:, :, None], 0.0).sum(-1)
    if alone:
        weights_BSK = torch.softmax(weights_BSK, -1)
    if config.normalise:
        weights_BSK = weights_BSK / (weights_BSK.sum(-1, keepdim=True) + TINY)
    return weights_BSK * config.scale


def _one_hot(experts_BSK: Tensor, num_experts: int) -> Tensor:
    return experts_BSK[..., None] == torch.arange(num_experts, device=experts_BSK.device)


def _losses(
    config: MoeConfig,
    logits_BSE: Tensor,
    scores_BSE: Tensor,
    experts_BSK: Tensor,
    counts_E: Tensor,
    routed_BS: Tensor | None,
    weight: Tensor,
) -> dict[str, Tensor]:
    """The side losses that `config` asks for. Tokens enter by plain sums only, which a sharded batch leaves pending."""
    (B, S, E), wide = scores_BSE.shape, scores_BSE.dtype
    shares_BSE = scores_BSE
    if config.score != "softmax":
        shares_BSE = scores_BSE / (scores_BSE.sum(-1, keepdim=True) + TINY)
    square_BS = torch.logsumexp(logits_BSE, -1).square()
    num_tokens_B: Tensor | int = S
    num_tokens: Tensor | int = B * S
    if routed_BS is not None:
        shares_BSE, square_BS = shares_BSE * routed_BS[..., None], square_BS * routed_BS
        num_tokens_B = routed_BS.to(wide).sum(1, keepdim=True).clamp(min=1.0)
        num_tokens = routed_BS.to(wide).sum().clamp(min=1.0)
    losses: dict[str, Tensor] = {}
    whole = config.token_groups == (1, 1)
    if config.aux_loss and not whole:
        losses["aux_loss"] = config.aux_loss * _balance_of_groups(config, shares_BSE, experts_BSK, routed_BS)
    if (config.aux_loss and whole) or config.global_aux_loss:
        load_E, mean_E = counts_E.to(wide) / num_tokens, shares_BSE.sum((0, 1)) / num_tokens
        balance = E * (load_E * mean_E).sum()
        losses |= {"aux_loss": config.aux_loss * balance} if config.aux_loss and whole else {}
        losses |= {"global_aux_loss": config.global_aux_loss * balance} if config.global_aux_loss else {}
    if config.seq_aux_loss:
        counts_BE = _one_hot(experts_BSK, E).to(wide).sum((1, 2))
        load_BE, mean_BE = counts_BE / num_tokens_B, shares_BSE.sum(1) / num_tokens_B
        losses["seq_aux_loss"] = config.seq_aux_loss * (load_BE * mean_BE).sum() * E / (config.top_k * B)
    if config.z_loss:
        losses["z_loss"] = config.z_loss * square_BS.sum() / num_tokens
    return {name: loss * weight for name, loss in losses.items()}


def _balance_of_groups(config: MoeConfig, shares_BSE: Tensor, experts_BSK: Tensor, routed_BS: Tensor | None) -> Tensor:
    """E * sum over experts of (slots / tokens) * (mean share), the mean over groups; a group of padding alone counts as zero."""
    (B, S, E), (g, h), wide = shares_BSE.shape, config.token_groups, shares_BSE.dtype
    counts_GHE = ops.group_counts(experts_BSK, num_experts=E, groups=(g, h)).to(wide)
    shares_GHE = shares_BSE.reshape(g, B // g, h, S // h, E).sum((1, 3))
    num_tokens: Tensor | int = B * S // (g * h)
    if routed_BS is not None:
        num_tokens = routed_BS.to(wide).reshape(g, B // g, h, S // h).sum((1, 3)).clamp(min=1.0)[..., None]
    return (counts_GHE / num_tokens * (shares_GHE / num_tokens)).sum() * E / (g * h)


def _grouped(
    params: Moe,
    config: MoeConfig,
    tokens_BSD: Tensor,
    x_BSD: Tensor,
    experts_BSK: Tensor,
    weights_BSK: Tensor,
    context: Mapping[str, Tensor],
) -> tuple[Tensor, Tensor | None]:
    """`(y_BSD of the experts, y_BSD of the shared layer)`: rows sorted by expert, one grouped product for each matrix."""
    rows_RD, offsets_E, inverse_BSK, arrivals_E = ops.dispatch(tokens_BSD, experts_BSK, num_experts=config.num_experts)
    shared_BSD = _shared(params, config, x_BSD, context)  # here: it has time to run while rows are on their way
    gate_RF = ops.name(_grouped_linear(rows_RD, params.gate_EDF, params.gate_bias_EF, offsets_E), "gate")
    up_RF = ops.name(_grouped_linear(rows_RD, params.up_EDF, params.up_bias_EF, offsets_E), "up")
    hidden_RF = ops.name(_activated(config, gate_RF, up_RF), "mlp_act")
    rows_RD = ops.grouped_matmul(hidden_RF, params.down_EFD, offsets_E)
    y_BSD = ops.constrain(ops.combine(rows_RD, inverse_BSK, arrivals_E, weights_BSK), RESIDUAL)
    return _with_down_bias(params, config, y_BSD, experts_BSK, weights_BSK), shared_BSD


def _with_down_bias(params: Moe, config: MoeConfig, y_BSD: Tensor, experts_BSK: Tensor, weights_BSK: Tensor) -> Tensor:
    """The biases of tokens, not of rows: rows may be parts of a sum, and biases would need them summed."""
    if params.down_bias_ED is None:
        return y_BSD
    chosen_BSKE = _one_hot(experts_BSK, config.num_experts)
    weights_BSE = torch.where(chosen_BSKE, weights_BSK[..., None], 0.0).sum(2).to(y_BSD.dtype)
    bias_BSD = ops.einsum("bse,ed->bsd", weights_BSE, params.down_bias_ED)
    return y_BSD + ops.constrain(bias_BSD, RESIDUAL)


def _grouped_linear(rows_RD: Tensor, weight_EDF: Tensor, bias_EF: Tensor | None, offsets_E: Tensor) -> Tensor:
    y_RF = ops.grouped_matmul(rows_RD, weight_EDF, offsets_E)
    if bias_EF is None:
        return y_RF
    # a product, so that whatever places rows and experts places the bias too; of as many ones as there are rows on this rank
    first_R1 = rows_RD[:, :1]
    ones_R1 = (first_R1 == first_R1).to(rows_RD.dtype)
    return y_RF + ops.grouped_matmul(ones_R1, bias_EF[:, None], offsets_E)


def _padded(
    params: Moe,
    config: MoeConfig,
    tokens_BSD: Tensor,
    x_BSD: Tensor,
    experts_BSK: Tensor,
    weights_BSK: Tensor,
    context: Mapping[str, Tensor],
) -> tuple[Tensor, Tensor | None]:
    """The same as `_grouped` with as many rows for each expert and group of tokens as there may be, C: a plain product."""
    capacity = _capacity(config, x_BSD)
    slots_BSK = ops.expert_slots(experts_BSK, num_experts=config.num_experts, capacity=capacity, groups=config.token_groups)
    rows_EGHCD = ops.fill_slots(
        tokens_BSD, slots_BSK, num_experts=config.num_experts, capacity=capacity, groups=config.token_groups
    )
    rows_EGHCD = ops.constrain(rows_EGHCD, ("expert", ..., ..., None, "embed"))  # groups lie on what experts leave
    shared_BSD = _shared(params, config, x_BSD, context)  # here: it has time to run while rows are on their way
    gate_EGHCF = ops.name(_padded_linear(rows_EGHCD, params.gate_EDF, params.gate_bias_EF), "gate")
    up_EGHCF = ops.name(_padded_linear(rows_EGHCD, params.up_EDF, params.up_bias_EF), "up")
    hidden_EGHCF = ops.name(_activated(config, gate_EGHCF, up_EGHCF), "mlp_act")
    rows_EGHCD = ops.einsum("eghcf,efd->eghcd", hidden_EGHCF, params.down_EFD)
    rows_EGHCD = ops.constrain(rows_EGHCD, (..., ..., ..., ..., ...))  # backward the rows come here, not experts to the rows
    y_BSD = ops.constrain(ops.take_slots(rows_EGHCD, slots_BSK, weights_BSK), RESIDUAL)
    return _with_down_bias(params, config, y_BSD, experts_BSK, weights_BSK), shared_BSD


def _padded_linear(rows_EGHCD: Tensor, weight_EDF: Tensor, bias_EF: Tensor | None) -> Tensor:
    y_EGHCF = ops.einsum("eghcd,edf->eghcf", rows_EGHCD, weight_EDF)
    return y_EGHCF if bias_EF is None else y_EGHCF + bias_EF[:, None, None, None]


def _sequential(
    params: Moe,
    config: MoeConfig,
    tokens_BSD: Tensor,
    x_BSD: Tensor,
    experts_BSK: Tensor,
    weights_BSK: Tensor,
    context: Mapping[str, Tensor],
) -> tuple[Tensor, Tensor | None]:
    """The same as `_grouped`: every expert on every token, weighted by zero where it was not chosen."""

    def linear(x: Tensor, weight_EDF: Tensor, bias_EF: Tensor | None, e: int) -> Tensor:
        y = ops.einsum("bsd,df->bsf", x, weight_EDF[e])
        return y if bias_EF is None else y + bias_EF[e]

    total_BSD: Tensor | None = None
    for e in range(config.num_experts):
        gate_BSF = linear(tokens_BSD, params.gate_EDF, params.gate_bias_EF, e)
        up_BSF = linear(tokens_BSD, params.up_EDF, params.up_bias_EF, e)
        y_BSD = linear(_activated(config, gate_BSF, up_BSF), params.down_EFD, params.down_bias_ED, e)
        weight_BS1 = torch.where(experts_BSK == e, weights_BSK, 0.0).sum(-1, keepdim=True)
        y_BSD = y_BSD.to(weight_BS1.dtype) * weight_BS1
        total_BSD = y_BSD if total_BSD is None else total_BSD + y_BSD
    assert total_BSD is not None
    return ops.constrain(total_BSD.to(x_BSD.dtype), RESIDUAL), _shared(params, config, x_BSD, context)


def _activated(config: MoeConfig, gate: Tensor, up: Tensor) -> Tensor:
    if config.clamp is None:
        return ACTIVATIONS[config.activation][0](gate, up)
    gate, up = gate.clamp(max=config.clamp), up.clamp(min=-config.clamp, max=config.clamp)
    return (up + 1) * (gate * torch.sigmoid(config.clamp_alpha * gate))


def _shared(params: Moe, config: MoeConfig, x_BSD: Tensor, context: Mapping[str, Tensor]) -> Tensor | None:
    if params.shared is None or config.shared is None:
        return None
    x_BSD = ops.constrain(x_BSD, ("batch", "seq", "embed"))
    y_BSD = mlp(params.shared, config.shared, x_BSD, context)
    if params.shared_gate_D1 is None:
        return y_BSD
    gate_BS1 = torch.sigmoid(ops.einsum("bsd,de->bse", x_BSD, params.shared_gate_D1))
    return y_BSD * ops.constrain(gate_BS1, ("batch", "residual_seq", None))
