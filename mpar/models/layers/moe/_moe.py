"""Mixture of experts: a router chooses a few feed-forward layers for each token (Shazeer et al. 2017, arXiv:1701.06538)."""

from collections.abc import Mapping

from torch import Tensor

from mpar import ops
from mpar.models.layers.moe._config import MoeConfig
from mpar.models.layers.moe._experts import capacity_of, grouped_experts, padded_experts, sequential_experts
from mpar.models.layers.moe._losses import side_losses
from mpar.models.layers.moe._params import Moe
from mpar.models.layers.moe._router import route, router_logits
from mpar.ops import group_sizes

__all__ = ["moe"]

TOKENS = ("moe_batch", "moe_seq", "embed")


def moe(
    params: Moe[Tensor], config: MoeConfig, x_BSD: Tensor, context: Mapping[str, Tensor], *, training: bool
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """`(y_BSD, losses, metrics)`. Tokens of document -1 (padding) go to no expert and count in no loss.

    Without `training` the router is "topk", and there are no capacity and no losses, so that a token does not depend on others.

    losses:  side losses, each times its coefficient and times context["weight"], because all losses of a batch are later divided
             by that weight. aux_loss is E * sum over experts of (slots / tokens) * (mean score), as in transformers, for one
             layer. seq_aux_loss is the mean of the same over rows, divided by top_k. global_aux_loss is the same over the whole
             step. In these, scores are normalised to sum 1. z_loss is the mean square of the logits' log-sum-exp.
    metrics: expert_counts (E,), the number of slots that chose each expert; and, if there is a capacity, dropped (), the number
             of slots that did not fit.
    """
    if training and config.of_all_tokens:
        group_sizes("a layer of experts", x_BSD.shape, config.token_groups)
    tokens_BSD = ops.constrain(x_BSD, TOKENS)
    logits_BSE = router_logits(params, tokens_BSD)
    documents_BS = context.get("documents")
    routed_BS = None if documents_BS is None else documents_BS != -1
    weights_BSK, experts_BSK, scores_BSE = route(params, config, logits_BSE, routed_BS, context, training=training)
    if routed_BS is not None:
        experts_BSK = experts_BSK.masked_fill(~routed_BS[..., None], -1)
    counts_E = ops.expert_counts(experts_BSK, num_experts=config.num_experts)
    metrics = {"expert_counts": counts_E}
    losses: dict[str, Tensor] = {}
    if training and config.of_all_tokens:
        losses = side_losses(config, logits_BSE, scores_BSE, experts_BSK, counts_E, routed_BS, context["weight"])
    padded = False
    if training and config.capacity_factor is not None:
        kept_BSK = ops.limit_capacity(
            experts_BSK,
            weights_BSK,
            context.get("order"),
            num_experts=config.num_experts,
            capacity=capacity_of(config, x_BSD),
            groups=config.token_groups,
        )
        padded = config.padded
        metrics["dropped"] = (experts_BSK != kept_BSK).sum()
        experts_BSK = kept_BSK
    apply = padded_experts if padded else grouped_experts if config.grouped else sequential_experts
    y_BSD, shared_BSD = apply(params, config, tokens_BSD, x_BSD, experts_BSK, weights_BSK, context)
    return ops.name(y_BSD if shared_BSD is None else y_BSD + shared_BSD, "mlp_out"), losses, metrics
