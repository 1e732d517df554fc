"""Limit of capacity: an expert takes a limited number of slots, and drops those with the smallest weights.

In Lepikhin et al. 2020, arXiv:2006.16668, the positions of tokens decide which are dropped; here the weights decide, among all
tokens of a group.
"""

import torch
from torch import Tensor

from mpar.errors import ConfigError, DtypeError, ShapeError
from mpar.ops.experts._token_groups import check_group, group_of_token, group_sizes
from mpar.ops.primitive import Cost, Primitive, ShardingRule, parse_sharding

__all__ = ["limit_capacity"]

limit_capacity_p = Primitive(
    "limit_capacity", "experts, weights, order? -> kept", num_experts="int", capacity="int", group="int[]"
)


def limit_capacity(
    experts: Tensor,
    weights: Tensor,
    order_S: Tensor | None = None,
    *,
    num_experts: int,
    capacity: int,
    groups: tuple[int, int] = (1, 1),
) -> Tensor:
    """`experts` (..., S, K) as int32, with -1 for slots that do not fit into the capacity of their expert.

    Of the slots that name it, each expert keeps the `capacity` slots with the largest `weights` (..., S, K). Of equal weights,
    the slot with the lowest original index is kept first: slots are compared by their leading dims, then by `order_S[s]` (or s),
    then by k. So the same slots are dropped in whatever order tokens are stored. NaN counts as the largest weight, so that it is
    kept and can be seen. Ids outside [0, E), such as -1, become -1 and need no room. There is no gradient.
    With `groups` = (g, h), as in `group_sizes`, each expert keeps `capacity` slots of each group of tokens (B, S, K).
    Raises ShapeError, DtypeError or ConfigError if operands or numbers do not fit each other.
    """
    if 2 <= experts.ndim != 3 and experts.shape == weights.shape:
        rows = (experts.shape[:-2].numel(), *experts.shape[-2:])
        operands, group = (experts.reshape(rows), weights.reshape(rows), order_S), group_sizes("limit_capacity", rows, groups)
        return limit_capacity_p.bind(*operands, num_experts=num_experts, capacity=capacity, group=group).view(experts.shape)
    group = group_sizes("limit_capacity", experts.shape, groups) if experts.ndim == 3 else [1, 1]
    return limit_capacity_p.bind(experts, weights, order_S, num_experts=num_experts, capacity=capacity, group=group)


@limit_capacity_p.def_abstract
def _abstract(experts, weights, order, *, num_experts, capacity, group):
    shapes = f"limit_capacity: experts are {tuple(experts.shape)}, weights {tuple(weights.shape)}"
    shapes += "" if order is None else f", order {tuple(order.shape)}"
    if experts.ndim != 3 or weights.shape != experts.shape or (order is not None and order.shape != experts.shape[1:2]):
        raise ShapeError(f"{shapes}; they must be (..., S, K), (..., S, K) and (S,)")
    integers = {name: x.dtype for name, x in (("experts", experts), ("order", order)) if x is not None}
    wrong = {name: dtype for name, dtype in integers.items() if dtype not in (torch.int32, torch.int64)}
    if wrong or not weights.is_floating_point():
        raise DtypeError(f"{shapes}: {wrong or weights.dtype}; weights must be floating, the others int32 or int64")
    if num_experts < 1 or capacity < 1:
        raise ConfigError(f"limit_capacity: num_experts is {num_experts}, capacity {capacity}; both must be positive")
    check_group("limit_capacity", experts.shape, group)
    return torch.empty(experts.shape, dtype=torch.int32, device=experts.device)


@limit_capacity_p.def_impl
def _impl(experts, weights, order, *, num_experts, capacity, group):
    slots = torch.arange(experts.numel(), device=experts.device).view(experts.shape)
    if order is not None:
        slots = slots[:, order.sort(stable=True).indices]
    # slots in their original order; two stable sorts then sort them by group and expert, then by weight, then by this order
    slots = slots.flatten()
    slots = slots[weights.flatten()[slots].sort(descending=True, stable=True).indices]
    ids = experts.flatten().long()
    ids = ids.masked_fill((ids < 0) | (ids >= num_experts), num_experts)
    of_group = group_of_token(experts.shape, group, ids.device)[..., None].expand(experts.shape).flatten()
    ids, by_expert = (of_group * (num_experts + 1) + ids)[slots].sort(stable=True)
    rank = torch.arange(ids.numel(), device=ids.device) - torch.searchsorted(ids, ids)
    ids = ids % (num_experts + 1)
    kept = ids.masked_fill((rank >= capacity) | (ids == num_experts), -1).int()
    return torch.empty_like(kept).scatter_(0, slots[by_expert], kept).view(experts.shape)


@limit_capacity_p.def_sharding_from
def _rule(*, group, **_) -> ShardingRule:
    """Groups may be sharded, but not the tokens within a group, because they compete for the capacity."""
    factors, sizes = "(g b) (h s) k", f"b:{group[0]} s:{group[1]}"
    return parse_sharding(f"{factors}, {factors}, (h s) -> {factors}", need_replication="b s k", sizes=sizes)


limit_capacity_p.def_batching_loop()


@limit_capacity_p.def_cost
def _cost(experts, weights, order, **_):
    return Cost(flops=0, bytes=experts.nbytes + weights.nbytes + 4 * experts.numel(), workspace=80 * experts.numel())
