"""Losses that balance the load of experts.

aux_loss is that of Switch (Fedus et al. 2021, arXiv:2101.03961, eq. 4-6), seq_aux_loss that of each sequence (DeepSeek-AI 2024,
arXiv:2412.19437, eq. 17-20), and z_loss that of the router's logits (Zoph et al. 2022, arXiv:2202.08906, eq. 5).
"""

import torch
from torch import Tensor

from mpar import ops
from mpar.models.layers.moe._config import MoeConfig
from mpar.models.layers.moe._router import TINY, one_hot

__all__ = ["side_losses"]


def side_losses(
    config: MoeConfig,
    logits_BSE: Tensor,
    scores_BSE: Tensor,
    experts_BSK: Tensor,
    counts_E: Tensor,
    routed_BS: Tensor | None,
    weight: Tensor,
) -> dict[str, Tensor]:
    """The side losses that `config` asks for. Tokens are only ever summed, so that a sharded batch gives pending sums."""
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
    one_group = config.token_groups == (1, 1)
    if config.aux_loss and not one_group:
        losses["aux_loss"] = config.aux_loss * _balance_of_groups(config, shares_BSE, experts_BSK, routed_BS)
    if (config.aux_loss and one_group) or config.global_aux_loss:
        load_E, mean_E = counts_E.to(wide) / num_tokens, shares_BSE.sum((0, 1)) / num_tokens
        balance = E * (load_E * mean_E).sum()
        losses |= {"aux_loss": config.aux_loss * balance} if config.aux_loss and one_group else {}
        losses |= {"global_aux_loss": config.global_aux_loss * balance} if config.global_aux_loss else {}
    if config.seq_aux_loss:
        counts_BE = one_hot(experts_BSK, E).to(wide).sum((1, 2))
        load_BE, mean_BE = counts_BE / num_tokens_B, shares_BSE.sum(1) / num_tokens_B
        losses["seq_aux_loss"] = config.seq_aux_loss * (load_BE * mean_BE).sum() * E / (config.top_k * B)
    if config.z_loss:
        losses["z_loss"] = config.z_loss * square_BS.sum() / num_tokens
    return {name: loss * weight for name, loss in losses.items()}


def _balance_of_groups(config: MoeConfig, shares_BSE: Tensor, experts_BSK: Tensor, routed_BS: Tensor | None) -> Tensor:
    """The mean over groups of E * sum over experts of (slots / tokens) * (mean share); a group that is all padding gives zero."""
    (B, S, E), (g, h), wide = shares_BSE.shape, config.token_groups, shares_BSE.dtype
    counts_GHE = ops.group_counts(experts_BSK, num_experts=E, groups=(g, h)).to(wide)
    shares_GHE = shares_BSE.reshape(g, B // g, h, S // h, E).sum((1, 3))
    num_tokens: Tensor | int = B * S // (g * h)
    if routed_BS is not None:
        num_tokens = routed_BS.to(wide).reshape(g, B // g, h, S // h).sum((1, 3)).clamp(min=1.0)[..., None]
    return (counts_GHE / num_tokens * (shares_GHE / num_tokens)).sum() * E / (g * h)
