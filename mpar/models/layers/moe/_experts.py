"""Three ways to compute the experts of a layer, with the same result: sorted rows, padded rows, or one expert after the other.

Each gives `(y_BSD of the experts, y_BSD of the shared layer)`. They compute the shared layer too, so that it can run while rows
are sent between ranks.
"""

import functools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from mpar import ops
from mpar.models.layers._feed_forward import ACTIVATIONS, mlp
from mpar.models.layers.moe._config import MoeConfig
from mpar.models.layers.moe._params import Moe
from mpar.models.layers.moe._router import one_hot

__all__ = ["capacity_of", "grouped_experts", "padded_experts", "sequential_experts"]

RESIDUAL = ("batch", "residual_seq", "embed")


def capacity_of(config: MoeConfig, x_BSD: Tensor) -> int:
    """The capacity of an expert in each of the config's groups of tokens."""
    return config.capacity(x_BSD.shape[0] * x_BSD.shape[1] // math.prod(config.token_groups))


def grouped_experts(
    params: Moe[Tensor],
    config: MoeConfig,
    tokens_BSD: Tensor,
    x_BSD: Tensor,
    experts_BSK: Tensor,
    weights_BSK: Tensor,
    context: Mapping[str, Tensor],
) -> tuple[Tensor, Tensor | None]:
    """The experts' and the shared layer's `y_BSD`: rows are sorted by expert; each matrix is one grouped product."""
    rows_RD, offsets_E, inverse_BSK, arrivals_E = ops.dispatch(tokens_BSD, experts_BSK, num_experts=config.num_experts)
    shared_BSD = _shared(params, config, x_BSD, context)  # computed at this point so that it runs while rows are sent

    @functools.cache
    def rows_of(x_BSF: Tensor) -> Tensor:
        return ops.dispatch(x_BSF, experts_BSK, num_experts=config.num_experts)[0]

    matrices = params.gate_EDF, params.up_EDF, params.down_EFD
    gate_EDF, up_EDF, down_EFD = (ops.of_rows(weight, rows_of) for weight in matrices)
    gate_RF = ops.name(_grouped_linear(rows_RD, gate_EDF, params.gate_bias_EF, offsets_E), "gate")
    up_RF = ops.name(_grouped_linear(rows_RD, up_EDF, params.up_bias_EF, offsets_E), "up")
    hidden_RF = ops.name(_activated(config, gate_RF, up_RF), "mlp_act")
    rows_RD = ops.grouped_matmul(hidden_RF, down_EFD, offsets_E)
    y_BSD = ops.constrain(ops.combine(rows_RD, inverse_BSK, arrivals_E, weights_BSK), RESIDUAL)
    return _with_down_bias(params, config, y_BSD, experts_BSK, weights_BSK), shared_BSD


def _with_down_bias(params: Moe[Tensor], config: MoeConfig, y_BSD: Tensor, experts_BSK: Tensor, weights_BSK: Tensor) -> Tensor:
    """`y_BSD` plus the experts' last biases. They are added to tokens because the rows of experts may still be pending sums."""
    if params.down_bias_ED is None:
        return y_BSD
    chosen_BSKE = one_hot(experts_BSK, config.num_experts)
    weights_BSE = torch.where(chosen_BSKE, weights_BSK[..., None], 0.0).sum(2).to(y_BSD.dtype)
    bias_BSD = ops.einsum("bse,ed->bsd", weights_BSE, params.down_bias_ED)
    return y_BSD + ops.constrain(bias_BSD, RESIDUAL)


def _grouped_linear(rows_RD: Tensor, weight_EDF: Tensor, bias_EF: Tensor | None, offsets_E: Tensor) -> Tensor:
    y_RF = ops.grouped_matmul(rows_RD, weight_EDF, offsets_E)
    if bias_EF is None:
        return y_RF
    # a grouped product with ones gives each row the bias of its expert, sharded like the product of the rows
    first_R1 = rows_RD[:, :1]
    ones_R1 = (first_R1 == first_R1).to(rows_RD.dtype)
    return y_RF + ops.grouped_matmul(ones_R1, bias_EF[:, None], offsets_E)


def padded_experts(
    params: Moe[Tensor],
    config: MoeConfig,
    tokens_BSD: Tensor,
    x_BSD: Tensor,
    experts_BSK: Tensor,
    weights_BSK: Tensor,
    context: Mapping[str, Tensor],
) -> tuple[Tensor, Tensor | None]:
    """Like `grouped_experts`, but each expert has C rows, its capacity, per group of tokens, so that no product is grouped."""
    capacity = capacity_of(config, x_BSD)
    slots_BSK = ops.expert_slots(experts_BSK, num_experts=config.num_experts, capacity=capacity, groups=config.token_groups)
    rows_EGHCD = ops.fill_slots(
        tokens_BSD, slots_BSK, num_experts=config.num_experts, capacity=capacity, groups=config.token_groups
    )
    # the dims of groups stay sharded along mesh axes that experts do not need
    rows_EGHCD = ops.constrain(rows_EGHCD, ("expert", ..., ..., None, "embed"))
    shared_BSD = _shared(params, config, x_BSD, context)  # computed at this point so that it runs while rows are sent
    gate_EGHCF = ops.name(_padded_linear(rows_EGHCD, params.gate_EDF, params.gate_bias_EF), "gate")
    up_EGHCF = ops.name(_padded_linear(rows_EGHCD, params.up_EDF, params.up_bias_EF), "up")
    hidden_EGHCF = ops.name(_activated(config, gate_EGHCF, up_EGHCF), "mlp_act")
    rows_EGHCD = ops.einsum("eghcf,efd->eghcd", hidden_EGHCF, params.down_EFD)
    # this changes nothing here; in the backward, rows are sent to the experts, not experts to the rows
    rows_EGHCD = ops.constrain(rows_EGHCD, (..., ..., ..., ..., ...))
    y_BSD = ops.constrain(ops.take_slots(rows_EGHCD, slots_BSK, weights_BSK), RESIDUAL)
    return _with_down_bias(params, config, y_BSD, experts_BSK, weights_BSK), shared_BSD


def _padded_linear(rows_EGHCD: Tensor, weight_EDF: Tensor, bias_EF: Tensor | None) -> Tensor:
    y_EGHCF = ops.einsum("eghcd,edf->eghcf", rows_EGHCD, weight_EDF)
    return y_EGHCF if bias_EF is None else y_EGHCF + bias_EF[:, None, None, None]


def sequential_experts(
    params: Moe[Tensor],
    config: MoeConfig,
    tokens_BSD: Tensor,
    x_BSD: Tensor,
    experts_BSK: Tensor,
    weights_BSK: Tensor,
    context: Mapping[str, Tensor],
) -> tuple[Tensor, Tensor | None]:
    """Like `grouped_experts`, but every expert computes every token; its weight is zero for tokens that did not choose it."""

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


def _shared(params: Moe[Tensor], config: MoeConfig, x_BSD: Tensor, context: Mapping[str, Tensor]) -> Tensor | None:
    if params.shared is None or config.shared is None:
        return None
    x_BSD = ops.constrain(x_BSD, ("batch", "seq", "embed"))
    y_BSD = mlp(params.shared, config.shared, x_BSD, context)
    if params.shared_gate_D1 is None:
        return y_BSD
    gate_BS1 = torch.sigmoid(ops.einsum("bsd,de->bse", x_BSD, params.shared_gate_D1))
    return y_BSD * ops.constrain(gate_BS1, ("batch", "residual_seq", None))
