"""Attention forward: each Triton program has one tile of queries of one head, and goes through the keys that the tile sees.

It keeps a running maximum (Dao 2023, arXiv:2307.08691, algorithm 1). Bound by matrix products: for every pair of a query and a
key, 2 N H FLOPs in the product with k and as many in the product with v. Scores are kept in base 2.
"""

import triton
import triton.language as tl

from mpar.kernels._attention_tiles import key_range, step, visible

__all__ = ["attention_fwd", "scores_of", "tile_of"]

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def tile_of(
    x, batch, head, start, num_rows, num_heads,
    ROWS: tl.constexpr, FROM: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Rows from `start` and features from `FROM` of one head, zeros beyond the last row, (ROWS, WIDTH).

    `x` is a descriptor of (B, N, S, SIZE); without TMA it points to contiguous (B, S, N, SIZE).
    """
    if TMA:
        tile = x.load([batch, head, start, FROM]).reshape([ROWS, WIDTH])
    else:
        rows = tl.arange(0, ROWS)[:, None]
        first = x + ((batch.to(tl.int64) * num_rows + start) * num_heads + head) * SIZE + FROM
        tile = tl.load(
            first + (rows * (num_heads * SIZE) + tl.arange(0, WIDTH)[None, :]), mask=start + rows < num_rows, other=0.0
        )
    return tile


@triton.jit
def scores_of(products, scale, soft_cap, SOFT_CAP: tl.constexpr):
    """`(scores, slope, factor)`: scores * factor are base-2 exponents; slope is the derivative of the soft cap."""
    if SOFT_CAP:
        scores = 1 - 2 / (1 + tl.exp2(products * (2 * LOG2_E * scale / soft_cap)))  # tanh, exact at both infinities
        slope, factor = 1 - scores * scores, soft_cap * LOG2_E
    else:
        scores, slope, factor = products, products, scale * LOG2_E
    return scores, slope, factor


@triton.jit
def _accumulate(
    acc, total, top, q, q_rest, k_src, k_rest_src, v_src, batch, kv_head, start,
    q_order, q_documents, k_order_ptr, k_documents_ptr, num_keys, num_kv_heads, window, scale, soft_cap,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    HEAD: tl.constexpr, REST: tl.constexpr, VALUE: tl.constexpr, TMA: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    k = tile_of(k_src, batch, kv_head, start, num_keys, num_kv_heads, BLOCK_N, 0, HEAD, HEAD + REST, TMA)
    products = tl.dot(q, k.T)
    if REST > 0:
        k_rest = tile_of(k_rest_src, batch, kv_head, start, num_keys, num_kv_heads, BLOCK_N, HEAD, REST, HEAD + REST, TMA)
        products = tl.dot(q_rest, k_rest.T, products)
    scores, _, factor = scores_of(products, scale, soft_cap, SOFT_CAP)
    if MASKED:
        keys = start + tl.arange(0, BLOCK_N)
        inside = keys < num_keys
        k_order = keys
        if k_order_ptr is not None:
            k_order = tl.load(k_order_ptr + keys, mask=inside, other=0)
        if k_documents_ptr is not None:
            k_documents = tl.load(k_documents_ptr + batch.to(tl.int64) * num_keys + keys, mask=inside, other=-1)[None, :]
        else:
            k_documents = None
        seen = visible(q_order[:, None], k_order[None, :], q_documents, k_documents, inside[None, :], window, CAUSAL, WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * factor)
    level = new_top
    if MASKED:
        level = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen nothing: -inf - -inf would be NaN
    p = tl.exp2(scores * factor - level[:, None])
    decay = tl.exp2(top - level)
    total = total * decay + tl.sum(p, 1)
    v = tile_of(v_src, batch, kv_head, start, num_keys, num_kv_heads, BLOCK_N, 0, VALUE, VALUE, TMA)
    acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None])
    return acc, total, new_top


@triton.jit
def attention_fwd(
    q_src, q_rest_src, k_src, k_rest_src, v_src, out_ptr, lse_ptr, sinks_ptr,
    ranges_ptr, q_order_ptr, k_order_ptr, q_documents_ptr, k_documents_ptr, range_stride,
    num_queries, num_keys, num_kv_heads, group, num_tiles, window, scale, soft_cap,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, HEAD: tl.constexpr, REST: tl.constexpr,
    VALUE: tl.constexpr, TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile = num_tiles - 1 - tl.program_id(0) % num_tiles  # where causal, the last tiles have most to do: they start first
    batch_head, num_heads = tl.program_id(0) // num_tiles, num_kv_heads * group
    batch, head = batch_head // num_heads, batch_head % num_heads
    start_m = tile * BLOCK_M
    rows = start_m + tl.arange(0, BLOCK_M)
    inside = rows < num_queries
    q = tile_of(q_src, batch, head, start_m, num_queries, num_heads, BLOCK_M, 0, HEAD, HEAD + REST, TMA)
    q_rest = q
    if REST > 0:
        q_rest = tile_of(q_rest_src, batch, head, start_m, num_queries, num_heads, BLOCK_M, HEAD, REST, HEAD + REST, TMA)
    q_order = rows
    if q_order_ptr is not None:
        q_order = tl.load(q_order_ptr + rows, mask=inside, other=0)
    if q_documents_ptr is not None:
        q_documents = tl.load(q_documents_ptr + batch.to(tl.int64) * num_queries + rows, mask=inside, other=-1)[:, None]
    else:
        q_documents = None
    first, full_first, full_last, last = key_range(
        ranges_ptr,
        batch.to(tl.int64) * range_stride + tile,
        start_m,
        num_queries,
        num_keys,
        window,
        CAUSAL,
        WINDOW,
        BLOCK_M,
        BLOCK_N,
    )
    acc = tl.zeros([BLOCK_M, VALUE], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    kv_head = head // group
    for start in tl.range(full_first, full_last, BLOCK_N):
        acc, total, top = _accumulate(
            acc, total, top, q, q_rest, k_src, k_rest_src, v_src, batch, kv_head, start,
            q_order, q_documents, k_order_ptr, k_documents_ptr, num_keys, num_kv_heads, window, scale, soft_cap,
            False, CAUSAL, WINDOW, SOFT_CAP, HEAD, REST, VALUE, TMA, BLOCK_N,
        )  # fmt: skip
    for edge in tl.range(0, (full_first - first) + (last - full_last), BLOCK_N):
        start = step(edge, first, full_first, full_last)
        acc, total, top = _accumulate(
            acc, total, top, q, q_rest, k_src, k_rest_src, v_src, batch, kv_head, start,
            q_order, q_documents, k_order_ptr, k_documents_ptr, num_keys, num_kv_heads, window, scale, soft_cap,
            True, CAUSAL, WINDOW, SOFT_CAP, HEAD, REST, VALUE, TMA, BLOCK_N,
        )  # fmt: skip
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        new_top = tl.maximum(top, sink)
        level = tl.where(new_top == float("-inf"), 0.0, new_top)
        decay = tl.exp2(top - level)
        total = total * decay + tl.exp2(sink - level)
        acc = acc * decay[:, None]
        top = new_top
    blind = total == 0
    acc = acc / tl.where(blind, 1.0, total)[:, None]
    lse = tl.where(blind, float("-inf"), (top + tl.log2(total)) / LOG2_E)
    where = (batch.to(tl.int64) * num_queries + rows) * num_heads + head
    tl.store(lse_ptr + where, lse, mask=inside)
    out = out_ptr + where[:, None] * VALUE + tl.arange(0, VALUE)[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=inside[:, None])
