"""Expert counts: how many slots name each expert, over all tokens or in each group of tokens. This is the load to be balanced."""

import torch
from torch import Tensor

from mpar.errors import ConfigError, DtypeError, ShapeError
from mpar.ops.experts._token_groups import check_group, group_of_token, group_sizes, num_groups
from mpar.ops.primitive import Cost, Primitive

__all__ = ["expert_counts", "group_counts"]

expert_counts_p = Primitive("expert_counts", "experts -> counts", num_experts="int")
group_counts_p = Primitive("group_counts", "experts -> counts", num_experts="int", group="int[]")


def expert_counts(experts: Tensor, *, num_experts: int) -> Tensor:
    """`counts_E`, int32: how many slots of `experts` (..., K) name each of the experts 0 .. `num_experts` - 1.

    Other ids, such as the -1 of a slot that was dropped, are not counted. There is no gradient.
    Raises ShapeError if `experts` has no dims or 2**31 slots, DtypeError if not int32 or int64, ConfigError if `num_experts` < 1.
    """
    return expert_counts_p.bind(experts, num_experts=num_experts)


@expert_counts_p.def_abstract
def _abstract(experts, *, num_experts):
    if experts.ndim < 1 or experts.numel() >= 2**31:
        raise ShapeError(f"expert_counts: experts are {tuple(experts.shape)}; they must be (..., K), fewer than 2**31")
    if experts.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"expert_counts: experts are {experts.dtype}, must be int32 or int64")
    if num_experts < 1:
        raise ConfigError(f"expert_counts: num_experts is {num_experts}, must be positive")
    return torch.empty(num_experts, dtype=torch.int32, device=experts.device)


@expert_counts_p.def_impl
def _impl(experts, *, num_experts):
    ids = experts.flatten().long()
    exists = ((ids >= 0) & (ids < num_experts)).int()
    counts = torch.zeros(num_experts, dtype=torch.int32, device=experts.device)
    return counts.scatter_add_(0, ids.clamp(0, num_experts - 1), exists)


expert_counts_p.def_sharding("... k -> e", need_replication="e")  # counts of shards of tokens are added
expert_counts_p.def_batching_loop()


@expert_counts_p.def_cost
def _cost(experts, *, num_experts):
    return Cost(flops=0, bytes=experts.nbytes + 4 * num_experts, workspace=22 * experts.numel())


def group_counts(experts_BSK: Tensor, *, num_experts: int, groups: tuple[int, int]) -> Tensor:
    """`counts_GHE`, int32: `expert_counts` of each group of tokens; `groups` = (g, h) as in `group_sizes`.

    Raises ShapeError if `groups` do not divide `experts_BSK`, and what `expert_counts` raises.
    """
    group = group_sizes("group_counts", experts_BSK.shape, groups)
    return group_counts_p.bind(experts_BSK, num_experts=num_experts, group=group)


@group_counts_p.def_abstract
def _abstract_groups(experts, *, num_experts, group):
    if experts.ndim != 3:
        raise ShapeError(f"group_counts: experts are {tuple(experts.shape)}; they must be (B, S, K)")
    check_group("group_counts", experts.shape, group)
    return _abstract(experts, num_experts=num_experts).new_empty((*num_groups(experts.shape, group), num_experts))


@group_counts_p.def_impl
def _impl_groups(experts, *, num_experts, group):
    g, h = num_groups(experts.shape, group)
    exists = (experts >= 0) & (experts < num_experts)
    of_group = group_of_token(experts.shape, group, experts.device)[..., None]
    ids = torch.where(exists, of_group * num_experts + experts, -1)
    return _impl(ids, num_experts=g * h * num_experts).view(g, h, num_experts)


group_counts_p.def_sharding("(g b) (h s) k -> g h e", need_replication="b s e")
group_counts_p.def_batching_loop()


@group_counts_p.def_cost
def _cost_groups(experts, *, num_experts, group):
    g, h = num_groups(experts.shape, group)
    return Cost(flops=0, bytes=experts.nbytes + 4 * g * h * num_experts, workspace=34 * experts.numel())
