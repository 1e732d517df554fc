"""Permute: tokens to rows that are sorted by expert, and back. A token has K rows, one for each of its slots.

`expert_order` sorts the slots; `permute` copies tokens to rows and `unpermute` sums rows for tokens. Each is the gradient of the
other.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mpar.errors import ConfigError, DtypeError, ShapeError
from mpar.ops.primitive import Cost, Primitive

__all__ = ["expert_order", "permute", "unpermute"]

expert_order_p = Primitive("expert_order", "experts -> order, inverse, counts, offsets", num_experts="int")
permute_p = Primitive("permute", "x, inverse -> rows")
unpermute_p = Primitive("unpermute", "rows, inverse, weights? -> y")
unpermute_bwd_p = Primitive("unpermute_bwd", "rows, inverse, weights, dy -> drows, dweights")
unpermute_p.bwd = unpermute_bwd_p


def expert_order(experts_TK: Tensor, *, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`(order_R, inverse_TK, counts_E, offsets_E)`: a stable sort of the R = T * K slots by their expert; all are int32.

    Row r of the sorted rows belongs to slot `order_R[r]`, which is token * K + k; `inverse_TK[t, k]` is the row of that slot.
    Expert e has `counts_E[e]` rows, and they end before row `offsets_E[e]`. A slot whose expert is outside [0, E), such as -1,
    goes to no expert: its row comes after those of all experts.
    Raises ShapeError if `experts_TK` is not (T, K), DtypeError if not int32 or int64, ConfigError if `num_experts` < 1.
    """
    return expert_order_p.bind(experts_TK, num_experts=num_experts)


def permute(x_TD: Tensor, inverse_TK: Tensor) -> Tensor:
    """`rows_RD` with `rows_RD[inverse_TK[t, k]] = x_TD[t]`, contiguous.

    `inverse_TK` has each of range(T * K) once, as `expert_order` gives it. Raises ShapeError or DtypeError.
    """
    return permute_p.bind(x_TD, inverse_TK)


def unpermute(rows_RD: Tensor, inverse_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    """`y_TD`, the sum over k of `weights_TK[t, k] * rows_RD[inverse_TK[t, k]]`, in the dtype of the rows.

    The sum is computed in float32 or wider. Without weights, each weight is 1. Additions have a fixed order, so that every run
    gives the same bits. Raises ShapeError or DtypeError.
    """
    return unpermute_p.bind(rows_RD, inverse_TK, weights_TK)


@expert_order_p.def_abstract
def _abstract_order(experts, *, num_experts):
    _check_indices("expert_order: experts", experts)
    if num_experts < 1:
        raise ConfigError(f"expert_order: num_experts is {num_experts}, must be positive")
    order, inverse, counts, offsets = (
        torch.empty(shape, dtype=torch.int32, device=experts.device)
        for shape in ((experts.numel(),), experts.shape, (num_experts,), (num_experts,))
    )
    return order, inverse, counts, offsets


def _check_indices(label: str, indices: Tensor) -> None:
    if indices.ndim != 2 or indices.shape[1] < 1 or indices.numel() >= 2**31:
        raise ShapeError(f"{label} have shape {tuple(indices.shape)}; it must be (T, K) with K > 0 and T * K < 2**31")
    if indices.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"{label} have dtype {indices.dtype}, need int32 or int64")


@expert_order_p.def_impl
def _impl_order(experts, *, num_experts):
    ids = experts.flatten().long()
    ids = ids.masked_fill((ids < 0) | (ids >= num_experts), num_experts)
    ids, order = ids.sort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    offsets = torch.searchsorted(ids, torch.arange(num_experts, device=ids.device), right=True)
    counts = offsets.diff(prepend=offsets.new_zeros(1))
    return order.int(), inverse.int().view(experts.shape), counts.int(), offsets.int()


@permute_p.def_abstract
def _abstract_permute(x, inverse):
    _check_indices("permute: inverse", inverse)
    if x.ndim != 2 or x.shape[0] != inverse.shape[0]:
        raise ShapeError(f"permute: x is {tuple(x.shape)}, inverse {tuple(inverse.shape)}; they must be (T, D) and (T, K)")
    if not x.is_floating_point():
        raise DtypeError(f"permute: x has dtype {x.dtype}, needs a floating dtype")
    return torch.empty((inverse.numel(), x.shape[1]), dtype=x.dtype, device=x.device)


@permute_p.def_impl
def _impl_permute(x, inverse):
    return x.index_select(0, _slots(inverse) // inverse.shape[1])


def _slots(inverse):
    """The slot of each row: token * K + k."""
    places = inverse.flatten().long()
    return torch.zeros_like(places).scatter_(0, places, torch.arange(places.numel(), device=places.device))


@permute_p.def_vjp_by_ops("inverse, drows -> dx")
def _vjp_permute(inverse, drows):
    return unpermute_p.bind(drows, inverse, None)


@unpermute_p.def_abstract
def _abstract_unpermute(rows, inverse, weights):
    _check_rows("unpermute", rows, inverse, weights)
    return torch.empty((inverse.shape[0], rows.shape[1]), dtype=rows.dtype, device=rows.device)


def _check_rows(name: str, rows: Tensor, inverse: Tensor, weights: Tensor | None) -> None:
    _check_indices(f"{name}: inverse", inverse)
    if rows.ndim != 2 or rows.shape[0] != inverse.numel() or (weights is not None and weights.shape != inverse.shape):
        shapes = f"rows are {tuple(rows.shape)}, inverse {tuple(inverse.shape)}"
        shapes += "" if weights is None else f", weights {tuple(weights.shape)}"
        raise ShapeError(f"{name}: {shapes}; they must be (T * K, D), (T, K) and (T, K)")
    if not rows.is_floating_point() or not (weights is None or weights.is_floating_point()):
        raise DtypeError(f"{name}: rows are {rows.dtype}, weights {getattr(weights, 'dtype', None)}; both must be floating")


def _wide(*tensors: Tensor | None) -> torch.dtype:
    wide = torch.float32
    for x in tensors:
        wide = wide if x is None else torch.promote_types(wide, x.dtype)
    return wide


@unpermute_p.def_impl
def _impl_unpermute(rows, inverse, weights):
    wide = _wide(rows, weights)
    if rows.dtype == wide and (weights is None or weights.dtype == wide):
        return F.embedding_bag(inverse, rows, per_sample_weights=weights, mode="sum")  # the loop below without its temporaries
    y = torch.zeros((inverse.shape[0], rows.shape[1]), dtype=wide, device=rows.device)
    for k, places in enumerate(inverse.long().unbind(1)):
        row = rows.index_select(0, places).to(wide)
        y.add_(row if weights is None else row.mul_(weights[:, k, None].to(wide)))
    return y.to(rows.dtype)


@unpermute_p.def_vjp_by_ops("rows, inverse, weights, dy -> drows, dweights")
def _vjp_unpermute(rows, inverse, weights, dy):
    if weights is None:
        return permute_p.bind(dy, inverse), None
    return unpermute_bwd_p.bind(rows, inverse, weights, dy)


@unpermute_bwd_p.def_abstract
def _abstract_unpermute_bwd(rows, inverse, weights, dy):
    _check_rows("unpermute_bwd", rows, inverse, weights)
    if dy.shape != (inverse.shape[0], rows.shape[1]):
        raise ShapeError(f"unpermute_bwd: dy is {tuple(dy.shape)}, must be {(inverse.shape[0], rows.shape[1])}")
    drows, dweights = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (rows, weights))
    return drows, dweights


@unpermute_bwd_p.def_impl
def _impl_unpermute_bwd(rows, inverse, weights, dy):
    """drows[inverse[t, k]] = weights[t, k] dy[t];  dweights[t, k] = <dy[t], rows[inverse[t, k]]>."""
    wide, slots = _wide(rows, weights), _slots(inverse)
    drows = dy.to(wide).index_select(0, slots // inverse.shape[1])
    dweights = (rows * drows).sum(1)[inverse.long()]
    drows.mul_(weights.flatten()[slots, None])
    return drows.to(rows.dtype), dweights.to(weights.dtype)


expert_order_p.def_sharding("t k -> r, t k, e, e", need_replication="t k r e")  # the row of a slot depends on all slots
expert_order_p.def_batching_loop()
permute_p.def_sharding("t d, t k -> r d", need_replication="t k r", linear="x")
permute_p.def_batching_loop()
unpermute_p.def_sharding("r d, t k, t k -> t d", need_replication="r t k", linear="rows weights")
unpermute_p.def_batching_loop()
unpermute_bwd_p.def_sharding("r d, t k, t k, t d -> r d, t k", need_replication="r t k", linear="dy")
unpermute_bwd_p.def_batching_loop()


@expert_order_p.def_cost
def _cost_order(experts, *, num_experts):
    return Cost(flops=0, bytes=experts.nbytes + 8 * experts.numel() + 8 * num_experts, workspace=16 * experts.numel())


@permute_p.def_cost
def _cost_permute(x, inverse):
    return Cost(flops=0, bytes=x.nbytes * (1 + inverse.shape[1]) + inverse.nbytes, workspace=16 * inverse.numel())


@unpermute_p.def_cost
def _cost_unpermute(rows, inverse, weights):
    y = inverse.shape[0] * rows.shape[1]
    return Cost(flops=2 * rows.numel(), bytes=rows.nbytes + y * rows.element_size() + 2 * inverse.nbytes, workspace=8 * y)


@unpermute_bwd_p.def_cost
def _cost_unpermute_bwd(rows, inverse, weights, dy):
    return Cost(flops=3 * rows.numel(), bytes=2 * rows.nbytes + dy.nbytes + 3 * inverse.nbytes, workspace=8 * rows.numel())
