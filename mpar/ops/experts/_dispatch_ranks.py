"""What one rank does for `dispatch` and `combine` when tokens, experts or both are spread over ranks.

Tokens are sharded over some mesh axes, experts over those that the strategy's table names. Along axes that shard both, rows
travel to the rank that holds their expert (all-to-all). Along axes that shard experts alone every rank has all tokens, and takes
the rows of its own experts; what it combines is then a part of a sum. With neither, all of it is local.
"""

from dataclasses import dataclass

import torch
from torch import fx

from mpar.errors import ShapeError
from mpar.ops.experts._permute import expert_order_p, permute_p, unpermute_bwd_p, unpermute_p
from mpar.ops.experts._rows import group_rows_p, head_rows_p, own_experts_p, pad_rows_p, take_rows_p
from mpar.ops.primitive import Emitter

__all__ = ["combine_bwd_on_rank", "combine_on_rank", "dispatch_on_rank"]

aten = torch.ops.aten


@dataclass(frozen=True)
class _Layout:
    """Mesh axes: `tokens` shard them, dim by dim; `exchanged` and `selected` shard the experts, with and without the tokens."""

    tokens: tuple[tuple[str, ...], ...]
    exchanged: tuple[str, ...]
    selected: tuple[str, ...]
    num_ranks: int  # along `exchanged`
    num_slots: int  # of a rank
    top_k: int

    @property
    def token_axes(self) -> tuple[str, ...]:
        return tuple(axis for axes in self.tokens for axis in axes)


def _layout(emit: Emitter, slots: fx.Node) -> _Layout:
    *leading, top_k = emit.shape(slots)
    tokens = tuple(emit.axes_of(f"leading{i}") for i in range(len(leading)))
    experts, sharding = emit.table("expert"), {axis for axes in tokens for axis in axes}
    exchanged = tuple(axis for axis in experts if axis in sharding)
    selected = tuple(axis for axis in experts if axis not in sharding)
    num_slots = top_k
    for size in leading:
        num_slots *= size
    return _Layout(tokens, exchanged, selected, emit.size(exchanged), num_slots, top_k)


def _flat(emit: Emitter, x: fx.Node, width: int) -> fx.Node:
    *leading, _ = emit.shape(x)
    num_rows = 1
    for size in leading:
        num_rows *= size
    return emit(aten.reshape.default, x, [num_rows, width])


def _per_rank(emit: Emitter, traffic: fx.Node, at: _Layout) -> tuple[fx.Node, fx.Node, fx.Node]:
    """`(sent, received, by expert)`: rows for and from each rank, and those that came as (experts, ranks)."""
    per_rank = emit.shape(traffic)[1] // at.num_ranks
    leaving, coming = (emit(aten.select.int, traffic, 0, i) for i in range(2))
    sent = emit(aten.sum.dim_IntList, emit(aten.reshape.default, leaving, [at.num_ranks, per_rank]), [1])
    by_expert = emit(aten.reshape.default, coming, [per_rank, at.num_ranks])
    return sent, emit(aten.sum.dim_IntList, by_expert, [0]), by_expert


def _to_experts(emit: Emitter, rows: fx.Node, traffic: fx.Node, at: _Layout) -> fx.Node:
    """Rows sorted by expert, on the rank that holds their tokens, to the ranks that hold their experts."""
    sent, received, by_expert = _per_rank(emit, traffic, at)
    (rows,) = emit.arrived(emit.exchange_rows(rows, sent, received, at.exchanged, None), [rows])
    return rows if emit.shape(by_expert)[0] == 1 else emit(group_rows_p, rows, by_expert, back=False)


def _to_tokens(emit: Emitter, rows: fx.Node, traffic: fx.Node, at: _Layout) -> fx.Node:
    """And back: one row for each slot of this rank's tokens, zeros for those of other ranks' experts."""
    if not at.exchanged:
        return emit(pad_rows_p, rows, num_rows=at.num_slots) if at.selected else rows
    sent, received, by_expert = _per_rank(emit, traffic, at)
    if emit.shape(by_expert)[0] > 1:
        rows = emit(group_rows_p, rows, by_expert, back=True)
    return emit.arrived(emit.exchange_rows(rows, received, sent, at.exchanged, at.num_slots), [rows])[0]


def dispatch_on_rank(emit: Emitter, x: fx.Node, experts: fx.Node, *, num_experts: int) -> tuple:
    """Rows, offsets, inverse and traffic of this rank."""
    at, axes = _layout(emit, experts), emit.table("expert")
    emit.opaque()
    slots, tokens = _flat(emit, experts, at.top_k), _flat(emit, x, emit.shape(x)[-1])
    num_own = num_experts // emit.size(at.selected)
    if at.num_slots % emit.size(at.selected):
        raise ShapeError(
            f"dispatch: {at.num_slots} slots (tokens x top-k of a rank) cannot be shared out on average among the "
            f"{emit.size(at.selected)} ranks along {at.selected}, which have the same tokens and different experts.\n"
            "Use a batch or sequence whose slots they divide, or let them have different tokens (a strategy with sp)."
        )
    if at.selected:
        sizes, exchanged = [emit.size((axis,)) for axis in axes], [axis in at.exchanged for axis in axes]
        mine = emit.coordinate(at.selected)
        slots = emit(own_experts_p, slots, num_experts=num_experts, sizes=sizes, exchanged=exchanged, mine=mine)
    sorted_ = emit(expert_order_p, slots, num_experts=num_own)
    order, inverse, counts, offsets = (emit.getitem(sorted_, i) for i in range(4))
    if at.selected:
        rows = emit(take_rows_p, tokens, order, offsets, num_rows=at.num_slots // emit.size(at.selected))
    else:
        rows = emit(permute_p, tokens, inverse)
    received = counts
    if at.exchanged:
        column = emit(aten.reshape.default, counts, [num_own, 1])
        by_expert = emit.all_to_all(column, at.exchanged, src=1, dst=0)
        received = emit(aten.reshape.default, by_expert, [num_own])
    traffic = emit(aten.stack.default, [counts, received])
    if at.exchanged:
        rows = _to_experts(emit, rows, traffic, at)
        ends = emit(aten.cumsum.default, emit(aten.sum.dim_IntList, by_expert, [1]), 0)
        offsets = emit(aten._to_copy.default, ends, dtype=torch.int32)
    inverse = emit(aten.reshape.default, inverse, list(emit.shape(experts)))
    everywhere = emit.ordered({*at.token_axes, *axes})
    elsewhere = set(everywhere) - set(axes)
    return (
        emit.placed(rows, everywhere),
        emit.placed(offsets, axes, partial=elsewhere),
        emit.placed(inverse, *at.tokens, partial=at.selected),
        emit.placed(traffic, (), at.selected, partial=set(everywhere) - set(at.selected)),
    )


def combine_on_rank(emit: Emitter, rows: fx.Node, inverse: fx.Node, traffic: fx.Node, weights: fx.Node | None) -> tuple:
    """This rank's tokens, and the rows that they were made of."""
    at, parts = _layout(emit, inverse), emit.partial(rows)
    emit.opaque()
    back = _to_tokens(emit, rows, traffic, at)
    weights = None if weights is None else _flat(emit, weights, at.top_k)
    y = emit(unpermute_p, back, _flat(emit, inverse, at.top_k), weights)
    y = emit(aten.reshape.default, y, [*emit.shape(inverse)[:-1], emit.shape(rows)[1]])
    partial = (*at.selected, *parts)
    return emit.placed(y, *at.tokens, partial=partial), emit.placed(back, emit.ordered(at.token_axes), partial=partial)


def combine_bwd_on_rank(
    emit: Emitter, back: fx.Node, inverse: fx.Node, traffic: fx.Node, weights: fx.Node | None, dy: fx.Node
) -> tuple:
    """Gradients of the rows, where their experts are, and of the weights."""
    at, parts = _layout(emit, inverse), emit.partial(back)
    emit.opaque()
    slots, dy = _flat(emit, inverse, at.top_k), _flat(emit, dy, emit.shape(back)[1])
    if weights is None:
        rows, dweights = emit(permute_p, dy, slots), emit(aten.new_empty.default, back, [0], pin_memory=False)
    else:
        both = emit(unpermute_bwd_p, back, slots, _flat(emit, weights, at.top_k), dy)
        rows, dweights = emit.same(emit.getitem(both, 0), parts), emit.getitem(both, 1)  # `back` matters to dweights alone
        dweights = emit(aten.reshape.default, dweights, list(emit.shape(weights)))
    if at.selected:
        counts = emit(aten.select.int, traffic, 0, 0)
        rows = emit(head_rows_p, rows, counts, num_rows=at.num_slots // emit.size(at.selected))
    if at.exchanged:
        rows = _to_experts(emit, rows, traffic, at)
    everywhere = emit.ordered({*at.token_axes, *at.exchanged, *at.selected})
    if weights is None:
        return emit.placed(rows, everywhere), emit.placed(dweights)
    return emit.placed(rows, everywhere), emit.placed(dweights, *at.tokens, partial={*at.selected, *parts})
