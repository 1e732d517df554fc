"""The local programs of `dispatch` and `combine`: what one rank does if tokens, experts or both are spread over ranks.

Tokens are sharded over some mesh axes, experts over those that the strategy's table names. Along axes that shard both, rows are
exchanged with the ranks that have their experts (all_to_all). Along axes that shard experts but not tokens, ranks have the same
tokens, and each selects the rows of its own experts; the result of `combine` is then a pending sum. Otherwise all is local.
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
class _Spread:
    """How tokens and experts are spread over ranks, and the numbers that follow.

    tokens:    for each leading dim of the tokens, the mesh axes that shard it.
    exchanged: mesh axes that shard experts and tokens; rows are exchanged along them.
    selected:  mesh axes that shard experts but not tokens; a rank selects the rows of its experts.
    """

    tokens: tuple[tuple[str, ...], ...]
    exchanged: tuple[str, ...]
    selected: tuple[str, ...]
    num_ranks: int  # along the axes `exchanged`
    num_slots: int  # of the tokens of one rank
    top_k: int

    @property
    def token_axes(self) -> tuple[str, ...]:
        return tuple(axis for axes in self.tokens for axis in axes)


def _spread_of(emit: Emitter, slots: fx.Node) -> _Spread:
    *leading, top_k = emit.shape(slots)
    tokens = tuple(emit.axes_of(f"leading{i}") for i in range(len(leading)))
    experts, sharding = emit.table("expert"), {axis for axes in tokens for axis in axes}
    exchanged = tuple(axis for axis in experts if axis in sharding)
    selected = tuple(axis for axis in experts if axis not in sharding)
    num_slots = top_k
    for size in leading:
        num_slots *= size
    return _Spread(tokens, exchanged, selected, emit.size(exchanged), num_slots, top_k)


def _flat(emit: Emitter, x: fx.Node, width: int) -> fx.Node:
    *leading, _ = emit.shape(x)
    num_rows = 1
    for size in leading:
        num_rows *= size
    return emit(aten.reshape.default, x, [num_rows, width])


def _per_rank(emit: Emitter, traffic: fx.Node, spread: _Spread) -> tuple[fx.Node, fx.Node, fx.Node]:
    """`(sent, received, by_expert)`: the numbers of rows sent to each rank and received from each, and those received as a matrix
    (experts, ranks)."""
    per_rank = emit.shape(traffic)[1] // spread.num_ranks
    sent_counts, received_counts = (emit(aten.select.int, traffic, 0, i) for i in range(2))
    sent = emit(aten.sum.dim_IntList, emit(aten.reshape.default, sent_counts, [spread.num_ranks, per_rank]), [1])
    by_expert = emit(aten.reshape.default, received_counts, [per_rank, spread.num_ranks])
    return sent, emit(aten.sum.dim_IntList, by_expert, [0]), by_expert


def _to_experts(emit: Emitter, rows: fx.Node, traffic: fx.Node, spread: _Spread) -> fx.Node:
    """Send rows, which are sorted by expert, from the rank of their tokens to the ranks of their experts."""
    sent, received, by_expert = _per_rank(emit, traffic, spread)
    (rows,) = emit.arrived(emit.exchange_rows(rows, sent, received, spread.exchanged, None), [rows])
    return rows if emit.shape(by_expert)[0] == 1 else emit(group_rows_p, rows, by_expert, back=False)


def _to_tokens(emit: Emitter, rows: fx.Node, traffic: fx.Node, spread: _Spread) -> fx.Node:
    """Send rows back to the rank of their tokens: one for each slot of its tokens, zeros for slots of experts not selected."""
    if not spread.exchanged:
        return emit(pad_rows_p, rows, num_rows=spread.num_slots) if spread.selected else rows
    sent, received, by_expert = _per_rank(emit, traffic, spread)
    if emit.shape(by_expert)[0] > 1:
        rows = emit(group_rows_p, rows, by_expert, back=True)
    return emit.arrived(emit.exchange_rows(rows, received, sent, spread.exchanged, spread.num_slots), [rows])[0]


def dispatch_on_rank(emit: Emitter, x: fx.Node, experts: fx.Node, *, num_experts: int) -> tuple:
    """The local program of `dispatch`: rows, offsets, inverse and traffic of this rank."""
    spread, axes = _spread_of(emit, experts), emit.table("expert")
    emit.opaque()
    slots, tokens = _flat(emit, experts, spread.top_k), _flat(emit, x, emit.shape(x)[-1])
    num_reachable = num_experts // emit.size(spread.selected)
    if spread.num_slots % emit.size(spread.selected):
        raise ShapeError(
            f"dispatch: {spread.num_slots} slots (tokens x top-k of a rank) cannot be divided evenly among the "
            f"{emit.size(spread.selected)} ranks along {spread.selected}, which have the same tokens and different experts.\n"
            "Use a batch or sequence whose slots are divisible by this number, or a strategy that gives these ranks different "
            "tokens (one with sp)."
        )
    if spread.selected:
        sizes, exchanged = [emit.size((axis,)) for axis in axes], [axis in spread.exchanged for axis in axes]
        mine = emit.coordinate(spread.selected)
        slots = emit(own_experts_p, slots, num_experts=num_experts, sizes=sizes, exchanged=exchanged, mine=mine)
    sorted_slots = emit(expert_order_p, slots, num_experts=num_reachable)
    order, inverse, counts, offsets = (emit.getitem(sorted_slots, i) for i in range(4))
    if spread.selected:
        rows = emit(take_rows_p, tokens, order, offsets, num_rows=spread.num_slots // emit.size(spread.selected))
    else:
        rows = emit(permute_p, tokens, inverse)
    received = counts
    if spread.exchanged:
        column = emit(aten.reshape.default, counts, [num_reachable, 1])
        by_expert = emit.all_to_all(column, spread.exchanged, src=1, dst=0)
        received = emit(aten.reshape.default, by_expert, [num_reachable])
    traffic = emit(aten.stack.default, [counts, received])
    if spread.exchanged:
        rows = _to_experts(emit, rows, traffic, spread)
        ends = emit(aten.cumsum.default, emit(aten.sum.dim_IntList, by_expert, [1]), 0)
        offsets = emit(aten._to_copy.default, ends, dtype=torch.int32)
    inverse = emit(aten.reshape.default, inverse, list(emit.shape(experts)))
    all_axes = emit.ordered({*spread.token_axes, *axes})
    other_axes = set(all_axes) - set(axes)
    return (
        emit.placed(rows, all_axes),
        emit.placed(offsets, axes, partial=other_axes),
        emit.placed(inverse, *spread.tokens, partial=spread.selected),
        emit.placed(traffic, (), spread.selected, partial=set(all_axes) - set(spread.selected)),
    )


def combine_on_rank(emit: Emitter, rows: fx.Node, inverse: fx.Node, traffic: fx.Node, weights: fx.Node | None) -> tuple:
    """The local program of `combine`: the results of this rank's tokens, and the rows that they were computed from."""
    spread, pending_axes = _spread_of(emit, inverse), emit.partial(rows)
    emit.opaque()
    back = _to_tokens(emit, rows, traffic, spread)
    weights = None if weights is None else _flat(emit, weights, spread.top_k)
    y = emit(unpermute_p, back, _flat(emit, inverse, spread.top_k), weights)
    y = emit(aten.reshape.default, y, [*emit.shape(inverse)[:-1], emit.shape(rows)[1]])
    partial = (*spread.selected, *pending_axes)
    return emit.placed(y, *spread.tokens, partial=partial), emit.placed(back, emit.ordered(spread.token_axes), partial=partial)


def combine_bwd_on_rank(
    emit: Emitter, back: fx.Node, inverse: fx.Node, traffic: fx.Node, weights: fx.Node | None, dy: fx.Node
) -> tuple:
    """The local program of `combine_bwd`: the gradients of the rows, on the ranks of their experts, and of the weights."""
    spread, pending_axes = _spread_of(emit, inverse), emit.partial(back)
    emit.opaque()
    slots, dy = _flat(emit, inverse, spread.top_k), _flat(emit, dy, emit.shape(back)[1])
    if weights is None:
        rows, dweights = emit(permute_p, dy, slots), emit(aten.new_empty.default, back, [0], pin_memory=False)
    else:
        grads = emit(unpermute_bwd_p, back, slots, _flat(emit, weights, spread.top_k), dy)
        rows, dweights = emit.same(emit.getitem(grads, 0), pending_axes), emit.getitem(grads, 1)  # `back` affects only dweights
        dweights = emit(aten.reshape.default, dweights, list(emit.shape(weights)))
    if spread.selected:
        counts = emit(aten.select.int, traffic, 0, 0)
        rows = emit(head_rows_p, rows, counts, num_rows=spread.num_slots // emit.size(spread.selected))
    if spread.exchanged:
        rows = _to_experts(emit, rows, traffic, spread)
    all_axes = emit.ordered({*spread.token_axes, *spread.exchanged, *spread.selected})
    if weights is None:
        return emit.placed(rows, all_axes), emit.placed(dweights)
    return emit.placed(rows, all_axes), emit.placed(dweights, *spread.tokens, partial={*spread.selected, *pending_axes})
