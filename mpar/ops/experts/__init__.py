"""Ops of a layer of experts: choosing experts, moving rows to experts and back, products of experts, and balancing their load."""

from mpar.ops.experts._dispatch import combine, dispatch
from mpar.ops.experts._expert_counts import expert_counts, group_counts
from mpar.ops.experts._grouped_matmul import grouped_matmul
from mpar.ops.experts._limit_capacity import limit_capacity
from mpar.ops.experts._permute import expert_order, permute, unpermute
from mpar.ops.experts._sinkhorn import sinkhorn
from mpar.ops.experts._slots import expert_slots, fill_slots, take_slots
from mpar.ops.experts._token_groups import group_sizes
from mpar.ops.experts._topk_router import ROUTER_TINY, RouterOrder, RouterScore, topk_router

__all__ = [
    "ROUTER_TINY",
    "RouterOrder",
    "RouterScore",
    "combine",
    "dispatch",
    "expert_counts",
    "expert_order",
    "expert_slots",
    "fill_slots",
    "group_counts",
    "group_sizes",
    "grouped_matmul",
    "limit_capacity",
    "permute",
    "sinkhorn",
    "take_slots",
    "topk_router",
    "unpermute",
]
