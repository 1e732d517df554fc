"""Experts of a traced model: transformers calls them through a table of functions, in which mpar's primitives have a name.

Tokens are sorted by expert, and each matrix of all experts is one grouped product; the ranks of `expert_parallel` send tokens to
each other (Gale et al. 2022, arXiv:2211.15841, section 5; Lepikhin et al. 2020, arXiv:2006.16668, section 3).
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mpar import ops
from mpar.errors import ConfigError
from mpar.models.traced._reading import current

__all__ = ["EXPERTS", "register_experts"]

EXPERTS = "mpar"
"""The name of the function in transformers' table."""

_TOKENS = ("moe_batch", "moe_seq", "embed")
_RESIDUAL = ("batch", "residual_seq", "embed")


def register_experts(transformers: ModuleType) -> None:
    """Enter mpar's experts in transformers' table."""
    transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)


def _experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What transformers calls with all tokens in one dim, and the experts and weights of each: (T, D), (T, K), (T, K)."""
    found = current(module)
    num_tokens, width = hidden_states.shape
    if num_tokens != found.rows * found.length or module.has_post_expert_norm:
        what = "a norm behind each expert" if module.has_post_expert_norm else f"{num_tokens} tokens, which are not those of x"
        raise ConfigError(f"{type(module).__name__} has {what}, which mpar's experts have not")
    x_BSD, experts_BSK, weights_BSK = (x.view(found.rows, found.length, -1) for x in (hidden_states, top_k_index, top_k_weights))
    rows_RD, offsets_E, inverse_BSK, traffic_2E = ops.dispatch(
        ops.constrain(x_BSD, _TOKENS), experts_BSK, num_experts=module.num_experts
    )
    hidden_RF = ops.name(_hidden(module, rows_RD, offsets_E), "mlp_act")
    down_EFD = module.down_proj if module.is_transposed else module.down_proj.transpose(1, 2)
    rows_RD = ops.grouped_matmul(hidden_RF, down_EFD, offsets_E)
    y_BSD = ops.constrain(ops.combine(rows_RD, inverse_BSK, traffic_2E, weights_BSK), _RESIDUAL)
    if module.has_bias:
        y_BSD = y_BSD + ops.constrain(_down_bias(module, experts_BSK, weights_BSK).to(y_BSD.dtype), _RESIDUAL)
    return y_BSD.reshape(num_tokens, width)


def _hidden(module: Any, rows_RD: Tensor, offsets_E: Tensor) -> Tensor:
    """What each row's expert has behind its activation."""
    name = "gate_up_proj" if module.has_gate else "up_proj"
    weights = _halves(module, getattr(module, name))
    biases = _halves(module, getattr(module, f"{name}_bias")) if module.has_bias else [None] * len(weights)
    parts = []
    for weight, bias_EF in zip(weights, biases, strict=True):
        part_RF = ops.grouped_matmul(rows_RD, weight if module.is_transposed else weight.transpose(1, 2), offsets_E)
        if bias_EF is not None:  # a grouped product with ones gives each row the bias of its expert
            first_R1 = rows_RD[:, :1]
            part_RF = part_RF + ops.grouped_matmul((first_R1 == first_R1).to(rows_RD.dtype), bias_EF[:, None], offsets_E)
        parts.append(part_RF)
    if not module.has_gate:
        return module.act_fn(parts[0])
    return module._apply_gate(_GateAndUp(*(ops.name(part, label) for part, label in zip(parts, ("gate", "up"), strict=True))))


def _halves(module: Any, stored: Tensor) -> list[Tensor]:
    """Gate and up, which are stored one behind the other, or in turns, along one dim; the tensor itself if there is no gate."""
    if not module.has_gate:
        return [stored]
    dim = stored.ndim - 1 if module.is_transposed or stored.ndim == 2 else 1
    if module.is_concatenated:
        return list(stored.chunk(2, dim))
    return list(stored.unflatten(dim, (stored.shape[dim] // 2, 2)).unbind(dim + 1))


class _GateAndUp:
    """Stands for gate and up in one tensor: what `_apply_gate` of transformers' experts takes apart."""

    def __init__(self, gate_RF: Tensor, up_RF: Tensor) -> None:
        self._parts = (gate_RF, up_RF)

    def chunk(self, chunks: int, dim: int) -> tuple[Tensor, Tensor]:
        """Gate and up."""
        if (chunks, dim) != (2, -1):
            raise ConfigError(f"experts cut what they compute into {chunks} along dim {dim}, not into gate and up")
        return self._parts

    def __getitem__(self, index: object) -> Tensor:
        """Every second column, from the first or the second on."""
        for part, first in zip(self._parts, (None, 1), strict=True):
            if index in ((..., slice(first, None, 2)), (..., slice(first or 0, None, 2))):
                return part
        raise ConfigError(f"experts take {index} of what they compute, which is neither gate nor up")


def _down_bias(module: Any, experts_BSK: Tensor, weights_BSK: Tensor) -> Tensor:
    """The biases of a token's experts, times their weights: added to tokens, because rows may still be pending sums."""
    chosen_BSKE = experts_BSK[..., None] == torch.arange(module.num_experts, device=experts_BSK.device)
    weights_BSE = torch.where(chosen_BSKE, weights_BSK[..., None], 0.0).sum(2).to(module.down_proj_bias.dtype)
    return ops.einsum("bse,ed->bsd", weights_BSE, module.down_proj_bias)
