"""Sinkhorn: scaling a matrix of tokens and experts until all tokens have the same total, and all experts have the same total.

Sinkhorn and Knopp 1967, Pacific Journal of Mathematics 21; used for routing tokens in Clark et al. 2022, arXiv:2202.01169.
"""

import torch
from torch import Tensor

from mpar.errors import ConfigError, DtypeError, ShapeError
from mpar.ops.experts._token_groups import by_group, check_group, group_sizes, num_groups
from mpar.ops.primitive import Cost, Primitive, ShardingRule, parse_sharding

__all__ = ["sinkhorn"]

EPS = 1e-8
"""Added to totals before dividing by them, because they may underflow to zero."""

sinkhorn_p = Primitive("sinkhorn", "logits -> scaled", tolerance="float", max_iterations="int", group="int[]")
sinkhorn_p.asks_host = True


def sinkhorn(logits: Tensor, *, tolerance: float = 1e-4, max_iterations: int = 100, groups: tuple[int, int] = (1, 1)) -> Tensor:
    """exp(`logits`) (..., E), scaled over all T tokens and E experts: rows have total 1 / T, columns 1 / E; float32 or wider.

    Rows and columns are scaled by turns until the factors of the columns change by at most `tolerance` on average, or
    `max_iterations` times. Columns are scaled last, so that their totals are exact. Logits above 88 overflow float32 in exp, and
    the result is then NaN. A row that is all -inf is not a token: it does not count in T, and its result is zero.
    There is no gradient. With `groups` = (g, h), as in `group_sizes`, each group of tokens (B, S) is scaled by itself.
    Raises ShapeError if `logits` has no dims, DtypeError if it is not floating, ConfigError if a number is not positive.
    """
    params = {"tolerance": float(tolerance), "max_iterations": max_iterations}
    if 1 <= logits.ndim != 3:
        rows = (1, logits.shape[:-1].numel(), logits.shape[-1])
        group = group_sizes("sinkhorn", rows, groups)
        return sinkhorn_p.bind(logits.reshape(rows), **params, group=group).view(logits.shape)
    return sinkhorn_p.bind(logits, **params, group=group_sizes("sinkhorn", logits.shape, groups) if logits.ndim else [1, 1])


@sinkhorn_p.def_abstract
def _abstract(logits, *, tolerance, max_iterations, group):
    if logits.ndim != 3 or not logits.shape[-1]:
        raise ShapeError(f"sinkhorn: logits are {tuple(logits.shape)}; they must be (..., E) with E > 0")
    if not logits.is_floating_point():
        raise DtypeError(f"sinkhorn: logits are {logits.dtype}, must be floating")
    if not tolerance > 0 or max_iterations < 1:
        numbers = f"tolerance is {tolerance}, max_iterations {max_iterations}"
        raise ConfigError(f"sinkhorn: {numbers}; both must be positive")
    check_group("sinkhorn", logits.shape, group)
    return torch.empty(logits.shape, dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)


@sinkhorn_p.def_impl
def _impl(logits, *, tolerance, max_iterations, group):
    cost_GTE = by_group(logits.to(torch.promote_types(logits.dtype, torch.float32)).exp(), group)
    if not cost_GTE.numel():
        return torch.empty(logits.shape, dtype=cost_GTE.dtype, device=logits.device)
    for cost_TE in cost_GTE:
        _scale(cost_TE, tolerance, max_iterations)
    (g, h), (b, s) = num_groups(logits.shape, group), group
    return cost_GTE.view(g, h, b, s, -1).transpose(1, 2).reshape(logits.shape)


def _scale(cost_TE, tolerance, max_iterations):
    num_tokens, num_experts = cost_TE.any(1).sum().clamp(min=1), cost_TE.shape[1]
    columns_E = cost_TE.new_ones(num_experts)
    for _ in range(max_iterations):
        rows_T = 1 / num_tokens / (cost_TE @ columns_E + EPS)
        before_E, columns_E = columns_E, 1 / num_experts / (rows_T @ cost_TE + EPS)
        if not (columns_E - before_E).abs().mean() > tolerance:  # also true for NaN
            break
    cost_TE.mul_(columns_E).mul_(rows_T.unsqueeze(1))


@sinkhorn_p.def_sharding_from
def _rule(*, group, **_) -> ShardingRule:
    """Groups may be sharded, but neither the tokens within a group nor experts, because totals are sums over them."""
    sizes = f"b:{group[0]} s:{group[1]}"
    return parse_sharding("(g b) (h s) e -> (g b) (h s) e", need_replication="b s e", sizes=sizes)


sinkhorn_p.def_batching_loop()


@sinkhorn_p.def_cost
def _cost(logits, *, max_iterations, **_):
    """Assumes a tenth of the iterations that are allowed."""
    wide = torch.promote_types(logits.dtype, torch.float32).itemsize
    flops = (4 * -(-max_iterations // 10) + 3) * logits.numel()
    copy = 0 if logits.element_size() == wide else wide * logits.numel()
    workspace = copy + wide * (4 * logits.shape[:2].numel() + 6 * logits.shape[2])
    return Cost(flops=flops, bytes=logits.nbytes + wide * logits.numel(), workspace=workspace)
