"""Attention of a rank whose queries are a part of the sequence: of whole keys, or of keys that go round the ranks in a ring.

Ring attention (Liu et al. 2023, arXiv:2310.01889): each rank attends to the block of keys and values that it has while the next
one is on its way; partial results are merged by their log-sum-exp, in float32 or wider. Backward, the gradients of a block travel
with it, in its dtype, one step behind, and are at home after the last one: n - 1 messages of blocks and n - 1 of gradients on n
ranks.
"""

from collections.abc import Callable, Iterator

import torch
from torch import fx

from mpar.ops.primitive import Emitter
from mpar.ops.sequence._merge_attention import merge_attention_p

__all__ = ["attend_on_rank", "attend_on_rank_bwd", "ring", "ring_bwd"]

aten = torch.ops.aten


def _orders(emit: Emitter, q: fx.Node, k: fx.Node, q_order: fx.Node | None, k_order: fx.Node | None) -> tuple[fx.Node, fx.Node]:
    """Original indices of this rank's queries and keys; where there are none given, those of contiguous shards."""
    pairs = ((q, "s", q_order), (k, "m", k_order))
    return tuple(_order(emit, emit.shape(x)[1], factor) if order is None else order for x, factor, order in pairs)  # type: ignore


def _order(emit: Emitter, length: int, factor: str) -> fx.Node:
    local = emit(aten.arange.default, length, dtype=torch.int64, device=torch.device("cpu"), pin_memory=False)
    return emit(aten.add.Tensor, local, emit.start_of(factor))


def _widened(emit: Emitter, x: fx.Node) -> fx.Node:
    wide = torch.promote_types(x.meta["val"].dtype, torch.float32)
    return x if wide == x.meta["val"].dtype else emit(aten._to_copy.default, x, dtype=wide)


def _like(emit: Emitter, x: fx.Node, like: fx.Node) -> fx.Node:
    dtype = like.meta["val"].dtype
    return x if x.meta["val"].dtype == dtype else emit(aten._to_copy.default, x, dtype=dtype)


def attend_on_rank(op: object) -> Callable:
    """The local program of attention `op`, queries sharded and keys whole."""

    def program(
        emit: Emitter,
        q: fx.Node,
        k: fx.Node,
        v: fx.Node,
        q_order: fx.Node | None,
        k_order: fx.Node | None,
        *rest: fx.Node,
        **params: object,
    ) -> tuple:
        emit.opaque()
        both = emit(op, q, k, v, *_orders(emit, q, k, q_order, k_order), *rest, **params)
        return emit.getitem(both, 0), emit.getitem(both, 1)

    return program


def attend_on_rank_bwd(op: object) -> Callable:
    """The same for the gradient: those of whole keys and values are parts of a sum over the queries."""

    def program(
        emit: Emitter,
        q: fx.Node,
        k: fx.Node,
        v: fx.Node,
        q_order: fx.Node | None,
        k_order: fx.Node | None,
        *rest: fx.Node,
        **params: object,
    ) -> tuple:
        emit.opaque()
        grads = emit(op, q, k, v, *_orders(emit, q, k, q_order, k_order), *rest, **params)
        dq, *others = (emit.getitem(grads, i) for i in range(4))
        return dq, *(emit.pending(grad) for grad in others)

    return program


def _blocks_of_ranks(emit: Emitter, axes: tuple[str, ...], *block: fx.Node | None) -> Iterator[list[fx.Node]]:
    """What there is of `block`, of this rank first, then of the ranks before it: while one is at hand the next is on its way."""
    here = [x for x in block if x is not None]
    for remaining in reversed(range(emit.size(axes))):
        coming = emit.shift(here, axes) if remaining else None
        yield here
        here = emit.arrived(coming, here) if coming is not None else here


def ring(op: object) -> Callable:
    """The local program of attention `op`, queries and keys sharded."""

    def program(
        emit: Emitter,
        q: fx.Node,
        k: fx.Node,
        v: fx.Node,
        q_order: fx.Node | None,
        k_order: fx.Node | None,
        q_docs: fx.Node | None,
        k_docs: fx.Node | None,
        sinks: fx.Node | None,
        **params: object,
    ) -> tuple:
        emit.opaque()
        axes, (q_order, k_order) = emit.axes_of("m"), _orders(emit, q, k, q_order, k_order)
        blocks = _blocks_of_ranks(emit, axes, k, v, k_order, k_docs)
        out = lse = None
        for step, (k, v, k_order, *docs) in enumerate(blocks):
            both = emit(op, q, k, v, q_order, k_order, q_docs, *(docs or [None]), None if step else sinks, **params)
            part = emit.getitem(both, 0), emit.getitem(both, 1)
            if out is None and step + 1 < emit.size(axes):
                part = _widened(emit, part[0]), part[1]  # the sum over blocks is kept wide
            if out is not None:
                merged = emit(merge_attention_p, out, lse, *part)
                part = emit.getitem(merged, 0), emit.getitem(merged, 1)
            out, lse = part
        return _like(emit, out, q), lse

    return program


def ring_bwd(op: object) -> Callable:
    """The local program of the gradient of attention `op`, queries and keys sharded."""

    def program(
        emit: Emitter,
        q: fx.Node,
        k: fx.Node,
        v: fx.Node,
        q_order: fx.Node | None,
        k_order: fx.Node | None,
        q_docs: fx.Node | None,
        k_docs: fx.Node | None,
        sinks: fx.Node | None,
        *results: fx.Node,
        **params: object,
    ) -> tuple:
        emit.opaque()
        axes, (q_order, k_order) = emit.axes_of("m"), _orders(emit, q, k, q_order, k_order)
        blocks = _blocks_of_ranks(emit, axes, k, v, k_order, k_docs)
        own: list[fx.Node] = []
        travelling: fx.Node | None = None  # gradients of the block before the one at hand, on their way to the next rank
        sent: list[fx.Node] = []
        dq = dsinks = None
        for step, (k, v, k_order, *docs) in enumerate(blocks):
            grads = emit(op, q, k, v, q_order, k_order, q_docs, *(docs or [None]), None if step else sinks, *results, **params)
            part, *of_block = (emit.getitem(grads, i) for i in range(3))
            dq = _widened(emit, part) if dq is None else emit(aten.add.Tensor, dq, part)
            if step == 0:
                own, dsinks = of_block, emit.getitem(grads, 3)
            else:
                if travelling is not None:
                    so_far = emit.arrived(travelling, sent)
                    of_block = [emit(aten.add.Tensor, a, b) for a, b in zip(so_far, of_block, strict=True)]
                travelling, sent = emit.shift(of_block, axes), of_block
        assert travelling is not None, "a ring has more than one rank"
        home = emit.arrived(travelling, sent)
        dk, dv = (emit(aten.add.Tensor, a, b) for a, b in zip(own, home, strict=True))
        return _like(emit, dq, q), dk, dv, emit.pending(dsinks)

    return program
