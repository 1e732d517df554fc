"""Dispatch and combine: `dispatch` brings tokens to the experts chosen for them, `combine` brings the experts' results back.

A token has K slots, one for each expert chosen for it. Rows are slots sorted by expert. If experts are spread over ranks, rows
are sent between ranks, and a rank then has the rows of its own experts, as many as the router chose. This module has the meaning
on one rank; `_dispatch_ranks.py` has the local programs of many ranks, which use the ops of `_permute.py` and exchanges of rows.
"""

import torch
from torch import Tensor

from mpar.errors import ConfigError, DtypeError, ShapeError
from mpar.ops.experts._dispatch_ranks import combine_bwd_on_rank, combine_on_rank, dispatch_on_rank
from mpar.ops.experts._permute import expert_order_p, permute_p, unpermute_bwd_p, unpermute_p
from mpar.ops.primitive import Cost, Primitive

__all__ = ["combine", "combine_bwd_p", "combine_p", "dispatch", "dispatch_p"]

dispatch_p = Primitive("dispatch", "x, experts -> rows, offsets, inverse, traffic", num_experts="int")
combine_p = Primitive("combine", "rows, inverse, traffic, weights? -> y, back")
combine_bwd_p = Primitive("combine_bwd", "back, inverse, traffic, weights?, dy -> drows, dweights")
combine_p.bwd = combine_bwd_p


def dispatch(x: Tensor, experts: Tensor, *, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`(rows_RD, offsets_E, inverse_...K, traffic_2E)`: the tokens `x` (..., D), K times each, sorted by expert.

    `experts` (..., K), integers; a slot whose expert is outside [0, E) goes to no expert, and its row comes after all others.
    R is the number of slots. The rows of expert e end before row `offsets_E[e]`, as in `grouped_matmul`. `inverse` has the row of
    each slot; `traffic_2E` the number of rows of each expert that were sent, and that were received. On a rank that has only some
    of the experts, the last three results are about the rows of this rank; only `grouped_matmul` and `combine` can use them.
    Raises ShapeError, DtypeError or ConfigError if the operands do not fit each other.
    """
    return dispatch_p.bind(x, experts, num_experts=num_experts)


def combine(rows: Tensor, inverse: Tensor, traffic: Tensor, weights: Tensor | None = None) -> Tensor:
    """`y` (..., D): for each token the sum over its K slots of `weights` (..., K) times the slot's row, in float32 or wider.

    `inverse` and `traffic` are results of `dispatch`. Without weights each slot has weight 1. A slot that went to no expert has a
    row of zeros after `grouped_matmul`. Additions have a fixed order. Raises ShapeError or DtypeError.
    """
    return combine_p.bind(rows, inverse, traffic, weights)[0]


def _check_slots(name: str, slots: Tensor) -> None:
    if slots.ndim < 2 or slots.shape[-1] < 1 or slots.numel() >= 2**31:
        raise ShapeError(f"{name} are {tuple(slots.shape)}; they must be (..., K) with K > 0 and fewer than 2**31 slots")
    if slots.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"{name} are {slots.dtype}, must be int32 or int64")


@dispatch_p.def_abstract
def _abstract_dispatch(x, experts, *, num_experts):
    _check_slots("dispatch: experts", experts)
    if x.ndim != experts.ndim or x.shape[:-1] != experts.shape[:-1]:
        raise ShapeError(f"dispatch: x is {tuple(x.shape)}, experts {tuple(experts.shape)}; they must be (..., D) and (..., K)")
    if not x.is_floating_point():
        raise DtypeError(f"dispatch: x is {x.dtype}, must be floating")
    if num_experts < 1:
        raise ConfigError(f"dispatch: num_experts is {num_experts}, must be positive")
    rows = torch.empty((experts.numel(), x.shape[-1]), dtype=x.dtype, device=x.device)
    sizes = ((num_experts,), tuple(experts.shape), (2, num_experts))
    return rows, *(torch.empty(size, dtype=torch.int32, device=x.device) for size in sizes)


@dispatch_p.def_impl
def _impl_dispatch(x, experts, *, num_experts):
    slots = experts.reshape(-1, experts.shape[-1])
    _, inverse, counts, offsets = expert_order_p.meaning(slots, num_experts=num_experts)
    rows = permute_p.meaning(x.reshape(-1, x.shape[-1]), inverse)
    return rows, offsets, inverse.view(experts.shape), torch.stack([counts, counts])


@dispatch_p.def_vjp_by_ops("inverse, traffic, drows -> dx")
def _vjp_dispatch(inverse, traffic, drows, *, num_experts):
    return combine_p.bind(drows, inverse, traffic, None)[0]


@combine_p.def_abstract
def _abstract_combine(rows, inverse, traffic, weights):
    _check_rows("combine: rows", rows, inverse, weights)
    y = torch.empty((*inverse.shape[:-1], rows.shape[-1]), dtype=rows.dtype, device=rows.device)
    return y, torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)


def _check_rows(name: str, rows: Tensor, inverse: Tensor, weights: Tensor | None) -> None:
    _check_slots("combine: inverse", inverse)
    if rows.ndim != 2 or rows.shape[0] != inverse.numel() or (weights is not None and weights.shape != inverse.shape):
        shapes = f"{name} are {tuple(rows.shape)}, inverse {tuple(inverse.shape)}"
        shapes += "" if weights is None else f", weights {tuple(weights.shape)}"
        raise ShapeError(f"{shapes}; with slots (..., K) they must be (all slots, D), (..., K) and (..., K)")
    if not rows.is_floating_point() or not (weights is None or weights.is_floating_point()):
        raise DtypeError(f"{name} are {rows.dtype}, weights {getattr(weights, 'dtype', None)}; both must be floating")


@combine_p.def_impl
def _impl_combine(rows, inverse, traffic, weights):
    slots = inverse.reshape(-1, inverse.shape[-1])
    y = unpermute_p.meaning(rows, slots, None if weights is None else weights.reshape(slots.shape))
    return y.view(*inverse.shape[:-1], rows.shape[-1]), rows.clone()  # a copy, because an op must not return its operand


@combine_p.def_vjp_by_ops("back, inverse, traffic, weights, dy -> drows, dweights")
def _vjp_combine(back, inverse, traffic, weights, dy):
    drows, dweights = combine_bwd_p.bind(back, inverse, traffic, weights, dy)
    return drows, None if weights is None else dweights


@combine_bwd_p.def_abstract
def _abstract_combine_bwd(back, inverse, traffic, weights, dy):
    _check_rows("combine_bwd: rows", back, inverse, weights)
    if dy.shape != (*inverse.shape[:-1], back.shape[-1]):
        raise ShapeError(f"combine_bwd: dy is {tuple(dy.shape)}, must be {(*inverse.shape[:-1], back.shape[-1])}")
    dweights = back.new_empty(0) if weights is None else torch.empty(weights.shape, dtype=weights.dtype, device=weights.device)
    return torch.empty(back.shape, dtype=back.dtype, device=back.device), dweights


@combine_bwd_p.def_impl
def _impl_combine_bwd(back, inverse, traffic, weights, dy):
    slots, dy = inverse.reshape(-1, inverse.shape[-1]), dy.reshape(-1, dy.shape[-1])
    if weights is None:
        return permute_p.meaning(dy, slots).to(back.dtype), back.new_empty(0)
    drows, dweights = unpermute_bwd_p.meaning(back, slots, weights.reshape(slots.shape), dy)
    return drows, dweights.view(weights.shape)


dispatch_p.def_sharding("... d, ... k -> r d, e, ... k, two e", need_replication="d k")
combine_p.def_sharding("_ d, ... k, two _, ... k -> ... d, _ d", need_replication="d k", as_is="rows inverse traffic")
combine_bwd_p.def_sharding("_ d, ... k, two _, ... k, ... d -> _ d, ... k", need_replication="d k", as_is="back inverse traffic")
dispatch_p.def_lowered(dispatch_on_rank)
combine_p.def_lowered(combine_on_rank)
combine_bwd_p.def_lowered(combine_bwd_on_rank)
for _primitive in (dispatch_p, combine_p, combine_bwd_p):
    _primitive.def_batching_loop()


@dispatch_p.def_cost
def _cost_dispatch(x, experts, *, num_experts):
    rows = experts.numel() * x.shape[-1] * x.element_size()
    return Cost(flops=0, bytes=x.nbytes + rows + 3 * experts.nbytes, workspace=16 * experts.numel())


@combine_p.def_cost
def _cost_combine(rows, inverse, traffic, weights):
    y = inverse[..., 0].numel() * rows.shape[-1]
    return Cost(flops=2 * rows.numel(), bytes=rows.nbytes + y * rows.element_size() + 2 * inverse.nbytes, workspace=8 * y)


@combine_bwd_p.def_cost
def _cost_combine_bwd(back, inverse, traffic, weights, dy):
    return Cost(flops=3 * back.numel(), bytes=2 * back.nbytes + dy.nbytes + 3 * inverse.nbytes, workspace=8 * back.numel())
