"""Slots of experts: every expert has as many rows as its capacity, so that no shape depends on data.

The rows of experts are (E, G, H, C, D): C slots of each of E experts for each of G x H groups of tokens, with zeros in slots
without a token (Lepikhin et al. 2020, arXiv:2006.16668, section 2.2). If groups and experts are sharded, rows move by ordinary
reshards.
"""

import torch
from torch import Tensor

from mpar.errors import ConfigError, DtypeError, ShapeError
from mpar.ops.experts._token_groups import by_group, check_group, group_of_token, group_sizes, num_groups
from mpar.ops.primitive import Cost, Primitive, ShardingRule, parse_sharding

__all__ = ["expert_slots", "fill_slots", "take_slots"]

_SIZES = {"num_experts": "int", "capacity": "int", "group": "int[]"}
expert_slots_p = Primitive("expert_slots", "experts -> slots", **_SIZES)
# the derivatives of the sum over (t, k) of weights[t, k] <x[t], rows[slot of (t, k)]> by rows, by x, and by weights
fill_slots_p = Primitive("fill_slots", "x, slots, weights? -> rows", start="int", **_SIZES)
take_slots_p = Primitive("take_slots", "rows, slots, weights? -> y", start="int")
slot_products_p = Primitive("slot_products", "rows, slots, x -> products", start="int")


def expert_slots(experts_BSK: Tensor, *, num_experts: int, capacity: int, groups: tuple[int, int] = (1, 1)) -> Tensor:
    """`slots_BSK`, int32: for each choice of an expert by a token, its slot expert * `capacity` + c in the group of the token.

    The tokens of an expert get c = 0, 1, ... in the order in which they are stored; those from `capacity` on get -1, and so do
    choices that are not in [0, `num_experts`). Each group of tokens has slots of its own; `groups` = (g, h) as in `group_sizes`.
    Raises ShapeError, DtypeError or ConfigError if operand and numbers do not fit each other.
    """
    group = _group("expert_slots", experts_BSK, groups)
    return expert_slots_p.bind(experts_BSK, num_experts=num_experts, capacity=capacity, group=group)


def fill_slots(
    x_BSD: Tensor,
    slots_BSK: Tensor,
    weights_BSK: Tensor | None = None,
    *,
    num_experts: int,
    capacity: int,
    groups: tuple[int, int] = (1, 1),
) -> Tensor:
    """`rows_EGHCD`: each token in its slots, times `weights_BSK` if given; zeros in slots without a token.

    `slots_BSK` and the numbers are those of `expert_slots`. Raises ShapeError, DtypeError or ConfigError if they do not fit.
    """
    group = _group("fill_slots", x_BSD, groups)
    return fill_slots_p.bind(x_BSD, slots_BSK, weights_BSK, start=0, num_experts=num_experts, capacity=capacity, group=group)


def take_slots(rows_EGHCD: Tensor, slots_BSK: Tensor, weights_BSK: Tensor | None = None) -> Tensor:
    """`y_BSD`: for each token the sum over its slots of `weights_BSK` times the slot's row, in float32 or wider.

    A slot of -1 adds nothing; without weights, each other slot has weight 1. Rows of slots without a token are not read.
    Additions have a fixed order. Raises ShapeError or DtypeError.
    """
    return take_slots_p.bind(rows_EGHCD, slots_BSK, weights_BSK, start=0)


def _group(op: str, x: Tensor, groups: tuple[int, int]) -> list[int]:
    if x.ndim != 3:
        raise ShapeError(f"{op}: the operand is {tuple(x.shape)}; it must be (B, S, K) or (B, S, D)")
    return group_sizes(op, x.shape, groups)


def _check_slots(op: str, slots: Tensor) -> None:
    if slots.ndim != 3 or slots.shape[2] < 1 or slots.numel() >= 2**31:
        raise ShapeError(f"{op} are {tuple(slots.shape)}; they must be (B, S, K) with K > 0 and fewer than 2**31")
    if slots.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"{op} are {slots.dtype}, must be int32 or int64")


def _check_numbers(op: str, num_experts: int, capacity: int) -> None:
    if num_experts < 1 or capacity < 1 or num_experts * capacity >= 2**31:
        raise ConfigError(
            f"{op}: num_experts is {num_experts}, capacity {capacity}; both must be positive, their product below 2**31"
        )


@expert_slots_p.def_abstract
def _abstract_slots(experts, *, num_experts, capacity, group):
    _check_slots("expert_slots: experts", experts)
    _check_numbers("expert_slots", num_experts, capacity)
    check_group("expert_slots", experts.shape, group)
    return torch.empty(experts.shape, dtype=torch.int32, device=experts.device)


@expert_slots_p.def_impl
def _impl_slots(experts, *, num_experts, capacity, group):
    ids = by_group(experts, group).flatten(1).long()
    order = by_group(torch.arange(experts.numel(), device=experts.device).view(experts.shape), group).flatten(1)
    ids = ids.masked_fill((ids < 0) | (ids >= num_experts), num_experts)
    ids, by_expert = ids.sort(dim=1, stable=True)
    rank = torch.arange(ids.shape[1], device=ids.device) - torch.searchsorted(ids, ids)
    slots = (ids * capacity + rank).masked_fill((rank >= capacity) | (ids == num_experts), -1).int()
    out = torch.empty(experts.numel(), dtype=torch.int32, device=experts.device)
    return out.scatter_(0, order.gather(1, by_expert).flatten(), slots.flatten()).view(experts.shape)


@fill_slots_p.def_abstract
def _abstract_fill(x, slots, weights, *, start, num_experts, capacity, group):
    _check_slots("fill_slots: slots", slots)
    _check_numbers("fill_slots", num_experts, capacity)
    if x.ndim != 3 or x.shape[:2] != slots.shape[:2] or (weights is not None and weights.shape != slots.shape):
        shapes = f"x is {tuple(x.shape)}, slots {tuple(slots.shape)}"
        shapes += "" if weights is None else f", weights {tuple(weights.shape)}"
        raise ShapeError(f"fill_slots: {shapes}; they must be (B, S, D), (B, S, K) and (B, S, K)")
    if not x.is_floating_point() or not (weights is None or weights.is_floating_point()):
        raise DtypeError(f"fill_slots: x is {x.dtype}, weights {getattr(weights, 'dtype', None)}; both must be floating")
    check_group("fill_slots", x.shape, group)
    g, h = num_groups(x.shape, group)
    return torch.empty((num_experts, g, h, capacity, x.shape[2]), dtype=x.dtype, device=x.device)


@fill_slots_p.def_impl
def _impl_fill(x, slots, weights, *, start, num_experts, capacity, group):
    shape = (num_experts, *num_groups(x.shape, group), capacity)
    if not slots.numel():
        return x.new_zeros((*shape, x.shape[2]))
    source = _sources(_rows_of(slots, shape, start), shape)
    slot = source.clamp(min=0)
    rows = x.reshape(-1, x.shape[2]).index_select(0, slot // slots.shape[2])
    if weights is not None:
        rows = rows.to(_wide(x, weights)).mul_(weights.flatten().index_select(0, slot)[:, None]).to(x.dtype)
    return rows.masked_fill_((source < 0)[:, None], 0).view(*shape, x.shape[2])


def _rows_of(slots, shape, start):
    """(B, S, K): the index of each slot's row among the rows (E, G, H, C), which are those of experts from `start` on.

    It is -1 for a slot that is -1 or is of another expert.
    """
    num_experts, g, h, capacity = shape
    group = [slots.shape[0] // max(g, 1), slots.shape[1] // max(h, 1)]
    slots = slots.long()
    expert, slot_of_expert = slots // capacity - start, slots % capacity
    of_group = group_of_token(slots.shape, group, slots.device)[..., None]
    rows = (expert * (g * h) + of_group) * capacity + slot_of_expert
    return rows.masked_fill((slots < 0) | (expert < 0) | (expert >= num_experts), -1)


def _sources(rows_BSK, shape):
    """For each row the index token * K + k of the choice that fills it, or -1."""
    num_rows = shape[0] * shape[1] * shape[2] * shape[3]
    rows = rows_BSK.flatten()
    rows = torch.where(rows < 0, num_rows, rows)  # choices that fill no row get an extra row at the end
    source = rows.new_full((num_rows + 1,), -1).scatter_(0, rows, torch.arange(rows.numel(), device=rows.device))
    return source[:num_rows]


@fill_slots_p.def_vjp_by_ops("x, slots, weights, drows -> dx, dweights")
def _vjp_fill(x, slots, weights, drows, *, start, **_):
    dx = take_slots_p.bind(drows, slots, weights, start=start)
    return dx, None if weights is None else slot_products_p.bind(drows, slots, x, start=start).to(weights.dtype)


@take_slots_p.def_abstract
def _abstract_take(rows, slots, weights, *, start):
    _check_take("take_slots", rows, slots, weights)
    return torch.empty((*slots.shape[:2], rows.shape[4]), dtype=rows.dtype, device=rows.device)


def _check_take(op: str, rows: Tensor, slots: Tensor, weights: Tensor | None) -> None:
    _check_slots(f"{op}: slots", slots)
    if rows.ndim != 5 or (weights is not None and weights.shape != slots.shape):
        shapes = f"rows are {tuple(rows.shape)}, slots {tuple(slots.shape)}"
        shapes += "" if weights is None else f", weights {tuple(weights.shape)}"
        raise ShapeError(f"{op}: {shapes}; they must be (E, G, H, C, D), (B, S, K) and (B, S, K)")
    if any(size % max(count, 1) for size, count in zip(slots.shape, rows.shape[1:3], strict=False)):
        raise ShapeError(
            f"{op}: slots of {tuple(slots.shape[:2])} tokens cannot be divided into the {tuple(rows.shape[1:3])} groups of rows"
        )
    if not rows.is_floating_point() or not (weights is None or weights.is_floating_point()):
        raise DtypeError(f"{op}: rows are {rows.dtype}, weights {getattr(weights, 'dtype', None)}; both must be floating")


@take_slots_p.def_impl
def _impl_take(rows, slots, weights, *, start):
    places = _rows_of(slots, rows.shape[:4], start)
    flat, wide = rows.reshape(-1, rows.shape[4]), _wide(rows, weights)
    y = torch.zeros((slots.shape[:2].numel(), rows.shape[4]), dtype=wide, device=rows.device)
    if not flat.shape[0]:
        return y.to(rows.dtype).view(*slots.shape[:2], -1)
    for k, place in enumerate(places.flatten(0, 1).unbind(1)):
        row = flat.index_select(0, place.clamp(min=0)).to(wide)
        if weights is not None:
            row.mul_(weights[..., k].reshape(-1, 1).to(wide))
        y.add_(row.masked_fill_((place < 0)[:, None], 0))
    return y.to(rows.dtype).view(*slots.shape[:2], rows.shape[4])


def _wide(rows, weights):
    wide = torch.promote_types(rows.dtype, torch.float32)
    return wide if weights is None else torch.promote_types(wide, weights.dtype)


@take_slots_p.def_vjp_by_ops("rows, slots, weights, dy -> drows, dweights")
def _vjp_take(rows, slots, weights, dy, *, start):
    drows = _filled_like(rows, slots, weights, dy, start)
    return drows, None if weights is None else slot_products_p.bind(rows, slots, dy, start=start).to(weights.dtype)


def _filled_like(rows, slots, weights, x, start):
    num_experts, g, h, capacity = rows.shape[:4]
    group = [slots.shape[0] // g, slots.shape[1] // h]
    sizes = {"num_experts": num_experts, "capacity": capacity, "group": group}
    return fill_slots_p.bind(x, slots, weights, start=start, **sizes)


@slot_products_p.def_abstract
def _abstract_products(rows, slots, x, *, start):
    _check_take("slot_products", rows, slots, None)
    if x.shape != (*slots.shape[:2], rows.shape[4]) or x.dtype != rows.dtype:
        wanted = (*slots.shape[:2], rows.shape[4])
        raise ShapeError(f"slot_products: x is {x.dtype} {tuple(x.shape)}, must be {rows.dtype} {wanted}")
    return torch.empty(slots.shape, dtype=_wide(rows, None), device=rows.device)


@slot_products_p.def_impl
def _impl_products(rows, slots, x, *, start):
    """products[t, k] = <x[t], rows[slot of (t, k)]>, or 0 if (t, k) has no slot."""
    wide, places = _wide(rows, None), _rows_of(slots, rows.shape[:4], start)
    if not rows.numel() or not slots.numel():
        return torch.zeros(slots.shape, dtype=wide, device=rows.device)
    flat, x = rows.reshape(-1, rows.shape[4]), x.to(wide)
    columns = [(flat.index_select(0, place.flatten().clamp(min=0)).view(x.shape) * x).sum(2) for place in places.unbind(2)]
    return torch.stack(columns, 2).masked_fill_(places < 0, 0)


@slot_products_p.def_vjp_by_ops("rows, slots, x, dproducts -> drows, dx")
def _vjp_products(rows, slots, x, dproducts, *, start):
    return _filled_like(rows, slots, dproducts, x, start), take_slots_p.bind(rows, slots, dproducts, start=start)


@expert_slots_p.def_sharding_from
def _rule_slots(*, group, **_) -> ShardingRule:
    sizes = f"b:{group[0]} s:{group[1]}"
    return parse_sharding("(g b) (h s) k -> (g b) (h s) k", need_replication="b s k", sizes=sizes)


# The rows of a group depend on all its tokens, so tokens within a group are not sharded. Rows are taken on the ranks where the
# tokens are. If experts are sharded over other axes, each rank takes the rows of its experts, and the result is a pending sum.
fill_slots_p.def_sharding(
    "(g b) (h s) d, (g b) (h s) k, (g b) (h s) k -> e g h c d", need_replication="b s k c", linear="x weights"
)
take_slots_p.def_sharding(
    "e g h c d, (g b) (h s) k, (g b) (h s) k -> (g b) (h s) d", need_replication="c k", linear="rows weights", leads="slots"
)
slot_products_p.def_sharding(
    "e g h c d, (g b) (h s) k, (g b) (h s) d -> (g b) (h s) k", need_replication="c k", linear="rows x", leads="slots"
)
for _primitive in (expert_slots_p, fill_slots_p, take_slots_p, slot_products_p):
    _primitive.def_batching_loop()


@fill_slots_p.def_sharded("e")
def _sharded_fill(emit, x, slots, weights, *, start, num_experts, capacity, group):
    sizes = {"num_experts": emit.extent_of("e"), "capacity": capacity, "group": group}
    return emit(fill_slots_p, x, slots, weights, start=emit.start, **sizes)


@take_slots_p.def_sharded("e")
def _sharded_take(emit, rows, slots, weights, *, start):
    return emit.pending(emit(take_slots_p, rows, slots, weights, start=emit.start))


@slot_products_p.def_sharded("e")
def _sharded_products(emit, rows, slots, x, *, start):
    return emit.pending(emit(slot_products_p, rows, slots, x, start=emit.start))


@expert_slots_p.def_cost
def _cost_slots(experts, **_):
    return Cost(flops=0, bytes=experts.nbytes + 4 * experts.numel(), workspace=64 * experts.numel())


@fill_slots_p.def_cost
def _cost_fill(x, slots, weights, *, num_experts, capacity, group, **_):
    g, h = num_groups(x.shape, group)
    num_rows, width = num_experts * capacity * g * h, x.shape[2] * x.element_size()
    moved = (min(num_rows, slots.numel()) + num_rows) * width
    workspace = 40 * slots.numel() + 24 * num_rows + (0 if weights is None else num_rows * (width + 4 * x.shape[2]))
    return Cost(flops=0 if weights is None else num_rows * x.shape[2], bytes=2 * slots.nbytes + moved, workspace=workspace)


@take_slots_p.def_cost
def _cost_take(rows, slots, weights, *, start):
    read = min(rows.shape[:4].numel(), slots.numel()) * rows.shape[4]
    y = slots.shape[:2].numel() * rows.shape[4]
    workspace = 40 * slots.numel() + 8 * y
    return Cost(flops=2 * read, bytes=(read + y) * rows.element_size() + 2 * slots.nbytes, workspace=workspace)


@slot_products_p.def_cost
def _cost_products(rows, slots, x, *, start):
    read = min(rows.shape[:4].numel(), slots.numel()) * rows.shape[4]
    workspace = 40 * slots.numel() + 12 * x.numel()
    return Cost(flops=2 * read, bytes=read * rows.element_size() + x.nbytes + 2 * slots.nbytes, workspace=workspace)
