"""The local programs of attention whose queries are sharded along the sequence. Keys are gathered, or sent round in a ring.

Ring attention (Liu et al. 2023, arXiv:2310.01889): while a rank attends to the block of keys and values that it has, it receives
the next block; the results of blocks are merged by their log-sum-exps, in float32 or wider. Backward, the gradients of a block
follow it round the ring, in the dtype of the block, and reach its own rank at the end. On n ranks, each rank sends n - 1 blocks
and n - 1 gradients of blocks.
"""

from collections.abc import Callable, Iterator

import torch
from torch import fx

from mpar.ops.primitive import Emitter
from mpar.ops.sequence._merge_attention import merge_attention_p

__all__ = ["attend_on_rank", "attend_on_rank_bwd", "ring", "ring_bwd"]

aten = torch.ops.aten


def _orders(emit: Emitter, q: fx.Node, k: fx.Node, q_order: fx.Node | None, k_order: fx.Node | None) -> tuple[fx.Node, fx.Node]:
    """The orders of this rank's queries and keys. An order that is not given is that of a contiguous shard."""
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
    """The local program of attention `op` if queries are sharded and keys are not."""

    def program(
        emit: Emitter,
        q: fx.Node,
        k: fx.Node,
        v: fx.Node,
        q_order: fx.Node | None,
        k_order: fx.Node | None,
        *more_operands: fx.Node,
        **params: object,
    ) -> tuple:
        emit.opaque()
        results = emit(op, q, k, v, *_orders(emit, q, k, q_order, k_order), *more_operands, **params)
        return emit.getitem(results, 0), emit.getitem(results, 1)

    return program


def attend_on_rank_bwd(op: object) -> Callable:
    """The local program of its gradient `op`; the gradients of keys and values are pending sums over the shards of queries."""

    def program(
        emit: Emitter,
        q: fx.Node,
        k: fx.Node,
        v: fx.Node,
        q_order: fx.Node | None,
        k_order: fx.Node | None,
        *more_operands: fx.Node,
        **params: object,
    ) -> tuple:
        emit.opaque()
        grads = emit(op, q, k, v, *_orders(emit, q, k, q_order, k_order), *more_operands, **params)
        dq, *others = (emit.getitem(grads, i) for i in range(4))
        return dq, *(emit.pending(grad) for grad in others)

    return program


def _blocks_of_ranks(emit: Emitter, axes: tuple[str, ...], *block: fx.Node | None) -> Iterator[list[fx.Node]]:
    """The block of this rank, then those of the ranks before it, without values that are None.

    Before a block is handed out, it is posted to the next rank, so that the next block arrives while this one is used.
    """
    current = [x for x in block if x is not None]
    for remaining in reversed(range(emit.size(axes))):
        posted = emit.shift(current, axes) if remaining else None
        yield current
        current = emit.arrived(posted, current) if posted is not None else current


def ring(op: object) -> Callable:
    """The local program of attention `op` if queries and keys are sharded."""

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
        for hop, (k, v, k_order, *docs) in enumerate(blocks):
            results = emit(op, q, k, v, q_order, k_order, q_docs, *(docs or [None]), None if hop else sinks, **params)
            part = emit.getitem(results, 0), emit.getitem(results, 1)
            if out is None and hop + 1 < emit.size(axes):
                part = _widened(emit, part[0]), part[1]  # results are merged in a wide dtype
            if out is not None:
                merged = emit(merge_attention_p, out, lse, *part)
                part = emit.getitem(merged, 0), emit.getitem(merged, 1)
            out, lse = part
        return _like(emit, out, q), lse

    return program


def ring_bwd(op: object) -> Callable:
    """The local program of the gradient `op` of attention if queries and keys are sharded."""

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
        first_grads: list[fx.Node] = []
        travelling: fx.Node | None = None  # the gradients of the previous block, posted to the next rank
        sent: list[fx.Node] = []
        dq = dsinks = None
        for hop, (k, v, k_order, *docs) in enumerate(blocks):
            grads = emit(op, q, k, v, q_order, k_order, q_docs, *(docs or [None]), None if hop else sinks, *results, **params)
            part, *of_block = (emit.getitem(grads, i) for i in range(3))
            dq = _widened(emit, part) if dq is None else emit(aten.add.Tensor, dq, part)
            if hop == 0:
                first_grads, dsinks = of_block, emit.getitem(grads, 3)
            else:
                if travelling is not None:
                    so_far = emit.arrived(travelling, sent)
                    of_block = [emit(aten.add.Tensor, a, b) for a, b in zip(so_far, of_block, strict=True)]
                travelling, sent = emit.shift(of_block, axes), of_block
        assert travelling is not None, "a ring has more than one rank"
        home = emit.arrived(travelling, sent)
        dk, dv = (emit(aten.add.Tensor, a, b) for a, b in zip(first_grads, home, strict=True))
        return _like(emit, dq, q), dk, dv, emit.pending(dsinks)

    return program
