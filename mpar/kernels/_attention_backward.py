"""Attention backward without atomics: one kernel sums dk and dv for each tile of keys, another sums dq for each tile of queries.

Both compute the probabilities again from lse (Dao 2023, arXiv:2307.08691, algorithm 2). The first kernel needs transposed
products and computes them directly, as K Q^T and V dO^T, because on Hopper Triton 3.4 to 3.7.0 miscompiles the transposed result
of one product as an operand of the next.
"""

import triton
import triton.language as tl

from mpar.kernels._attention_forward import scores_of, tile_of
from mpar.kernels._attention_tiles import key_range, query_range, step, visible

__all__ = ["attention_delta", "attention_dkdv", "attention_dq"]

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attention_delta(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, levels_ptr, delta_ptr, num_queries, num_heads, padded,
    dout_stride_B, dout_stride_S, dout_stride_N, VALUE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`delta = rowsum(out * dout) - dlse`, and lse in base 2, +inf for rows that see nothing, (B, N, padded)."""
    batch_head = tl.program_id(0)  # of this dim a grid may have 2**31, of the other 65535
    batch, head = (batch_head // num_heads).to(tl.int64), batch_head % num_heads
    rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < num_queries
    features = tl.arange(0, VALUE)[None, :]
    where = (batch * num_queries + rows) * num_heads + head
    dout_where = batch * dout_stride_B + rows.to(tl.int64) * dout_stride_S + head.to(tl.int64) * dout_stride_N
    out = tl.load(out_ptr + where[:, None] * VALUE + features, mask=inside[:, None], other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + dout_where[:, None] + features, mask=inside[:, None], other=0.0).to(tl.float32)
    delta = tl.sum(out * dout, 1)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + where, mask=inside, other=0.0)
    lse = tl.load(lse_ptr + where, mask=inside, other=float("-inf"))
    blind = lse == float("-inf")
    place = batch_head.to(tl.int64) * padded + rows
    tl.store(levels_ptr + place, tl.where(blind, float("inf"), lse * LOG2_E))
    tl.store(delta_ptr + place, tl.where(blind, 0.0, delta))


@triton.jit
def _accumulate_dkdv(
    dk, dk_rest, dv, k, k_rest, v, q_src, q_rest_src, dout_src, levels_ptr, delta_ptr, batch, head, start,
    k_order, k_documents, q_order_ptr, q_documents_ptr, num_queries, num_heads, window, scale, soft_cap,
    MASKED: tl.constexpr, OF_K: tl.constexpr, OF_V: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, HEAD: tl.constexpr, REST: tl.constexpr, VALUE: tl.constexpr,
    TMA: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    rows = start + tl.arange(0, BLOCK_M)
    q = tile_of(q_src, batch, head, start, num_queries, num_heads, BLOCK_M, 0, HEAD, HEAD + REST, TMA)
    products = tl.dot(k, q.T)
    q_rest = q
    if REST > 0:
        q_rest = tile_of(q_rest_src, batch, head, start, num_queries, num_heads, BLOCK_M, HEAD, REST, HEAD + REST, TMA)
        products = tl.dot(k_rest, q_rest.T, products)
    scores, slope, factor = scores_of(products, scale, soft_cap, SOFT_CAP)
    p = tl.exp2(scores * factor - tl.load(levels_ptr + rows)[None, :])
    if MASKED:
        inside = rows < num_queries
        q_order = rows
        if q_order_ptr is not None:
            q_order = tl.load(q_order_ptr + rows, mask=inside, other=0)
        if q_documents_ptr is not None:
            q_documents = tl.load(q_documents_ptr + batch.to(tl.int64) * num_queries + rows, mask=inside, other=-1)[None, :]
        else:
            q_documents = None
        everywhere = tl.full([1, 1], 1, tl.int1)  # rows after the last have level +inf, and so p = 0
        seen = visible(q_order[None, :], k_order[:, None], q_documents, k_documents, everywhere, window, CAUSAL, WINDOW)
        p = tl.where(seen, p, 0.0)
    dout = tile_of(dout_src, batch, head, start, num_queries, num_heads, BLOCK_M, 0, VALUE, VALUE, TMA)
    if OF_V:
        dv = tl.dot(p.to(dout.dtype), dout, dv)
    if OF_K:
        dp = tl.dot(v, dout.T)
        dscores = p * (dp - tl.load(delta_ptr + rows)[None, :])
        if SOFT_CAP:
            dscores *= slope
        dscores = dscores.to(q.dtype)
        dk = tl.dot(dscores, q, dk)
        if REST > 0:
            dk_rest = tl.dot(dscores, q_rest, dk_rest)
    return dk, dk_rest, dv


@triton.jit
def attention_dkdv(
    q_src, q_rest_src, k_src, k_rest_src, v_src, dout_src, levels_ptr, delta_ptr, dk_ptr, dv_ptr,
    ranges_ptr, q_order_ptr, k_order_ptr, q_documents_ptr, k_documents_ptr, range_stride,
    num_queries, num_keys, num_kv_heads, group, num_tiles, padded, window, scale, soft_cap,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, HEAD: tl.constexpr, REST: tl.constexpr,
    VALUE: tl.constexpr, TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`dk_ptr` or `dv_ptr` may be None: heads of 256 leave no registers for both sums at once."""
    OF_K: tl.constexpr = dk_ptr is not None
    OF_V: tl.constexpr = dv_ptr is not None
    tile, batch_head = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles
    batch, kv_head = batch_head // num_kv_heads, batch_head % num_kv_heads
    start_n = tile * BLOCK_N
    keys = start_n + tl.arange(0, BLOCK_N)
    inside = keys < num_keys
    num_heads = num_kv_heads * group
    k = tile_of(k_src, batch, kv_head, start_n, num_keys, num_kv_heads, BLOCK_N, 0, HEAD, HEAD + REST, TMA)
    v = tile_of(v_src, batch, kv_head, start_n, num_keys, num_kv_heads, BLOCK_N, 0, VALUE, VALUE, TMA)
    dk, dv = tl.zeros([BLOCK_N, HEAD], tl.float32), tl.zeros([BLOCK_N, VALUE], tl.float32)
    k_rest, dk_rest = k, tl.zeros([BLOCK_N], tl.float32)
    if REST > 0:
        k_rest = tile_of(k_rest_src, batch, kv_head, start_n, num_keys, num_kv_heads, BLOCK_N, HEAD, REST, HEAD + REST, TMA)
        dk_rest = tl.zeros([BLOCK_N, REST], tl.float32)
    range_index = batch.to(tl.int64) * range_stride + tile
    first, full_first, full_last, last = query_range(
        ranges_ptr, range_index, start_n, num_queries, num_keys, window, CAUSAL, WINDOW, BLOCK_M, BLOCK_N
    )
    first_head = kv_head * group
    num_full, num_edges = (full_last - full_first) // BLOCK_M, ((full_first - first) + (last - full_last)) // BLOCK_M
    for index in tl.range(0, group * num_full):  # over heads and tiles at once: a loop in a loop drains the pipeline each time
        head, start = first_head + index // num_full, full_first + index % num_full * BLOCK_M
        place = (batch * num_heads + head).to(tl.int64) * padded
        dk, dk_rest, dv = _accumulate_dkdv(
            dk, dk_rest, dv, k, k_rest, v, q_src, q_rest_src, dout_src, levels_ptr + place, delta_ptr + place,
            batch, head, start, keys, None, q_order_ptr, q_documents_ptr, num_queries, num_heads,
            window, scale, soft_cap, False, OF_K, OF_V, CAUSAL, WINDOW, SOFT_CAP, HEAD, REST, VALUE, TMA, BLOCK_M,
        )  # fmt: skip
    k_order = keys
    if k_order_ptr is not None:
        k_order = tl.load(k_order_ptr + keys, mask=inside, other=0)
    if k_documents_ptr is not None:
        k_documents = tl.load(k_documents_ptr + batch.to(tl.int64) * num_keys + keys, mask=inside, other=-1)[:, None]
    else:
        k_documents = None
    for index in tl.range(0, group * num_edges):
        head, start = first_head + index // num_edges, step(index % num_edges * BLOCK_M, first, full_first, full_last)
        place = (batch * num_heads + head).to(tl.int64) * padded
        dk, dk_rest, dv = _accumulate_dkdv(
            dk, dk_rest, dv, k, k_rest, v, q_src, q_rest_src, dout_src, levels_ptr + place, delta_ptr + place,
            batch, head, start, k_order, k_documents, q_order_ptr, q_documents_ptr, num_queries, num_heads,
            window, scale, soft_cap, True, OF_K, OF_V, CAUSAL, WINDOW, SOFT_CAP, HEAD, REST, VALUE, TMA, BLOCK_M,
        )  # fmt: skip
    where = ((batch.to(tl.int64) * num_keys + keys) * num_kv_heads + kv_head)[:, None]
    if OF_K:
        dk_ptrs = dk_ptr + where * (HEAD + REST) + tl.arange(0, HEAD)[None, :]
        tl.store(dk_ptrs, (dk * scale).to(dk_ptr.dtype.element_ty), mask=inside[:, None])
        if REST > 0:
            rest_ptrs = dk_ptr + where * (HEAD + REST) + HEAD + tl.arange(0, REST)[None, :]
            tl.store(rest_ptrs, (dk_rest * scale).to(dk_ptr.dtype.element_ty), mask=inside[:, None])
    if OF_V:
        dv_ptrs = dv_ptr + where * VALUE + tl.arange(0, VALUE)[None, :]
        tl.store(dv_ptrs, dv.to(dv_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _accumulate_dq(
    dq, dq_rest, q, q_rest, dout, level, delta, k_src, k_rest_src, v_src, batch, kv_head, start,
    q_order, q_documents, k_order_ptr, k_documents_ptr, num_keys, num_kv_heads, window, scale, soft_cap,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    HEAD: tl.constexpr, REST: tl.constexpr, VALUE: tl.constexpr, TMA: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    k = tile_of(k_src, batch, kv_head, start, num_keys, num_kv_heads, BLOCK_N, 0, HEAD, HEAD + REST, TMA)
    products = tl.dot(q, k.T)
    k_rest = k
    if REST > 0:
        k_rest = tile_of(k_rest_src, batch, kv_head, start, num_keys, num_kv_heads, BLOCK_N, HEAD, REST, HEAD + REST, TMA)
        products = tl.dot(q_rest, k_rest.T, products)
    scores, slope, factor = scores_of(products, scale, soft_cap, SOFT_CAP)
    p = tl.exp2(scores * factor - level[:, None])
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
        p = tl.where(seen, p, 0.0)
    v = tile_of(v_src, batch, kv_head, start, num_keys, num_kv_heads, BLOCK_N, 0, VALUE, VALUE, TMA)
    dp = tl.dot(dout, v.T)
    dscores = p * (dp - delta[:, None])
    if SOFT_CAP:
        dscores *= slope
    dscores = dscores.to(k.dtype)
    dq = tl.dot(dscores, k, dq)
    if REST > 0:
        dq_rest = tl.dot(dscores, k_rest, dq_rest)
    return dq, dq_rest


@triton.jit
def attention_dq(
    q_src, q_rest_src, k_src, k_rest_src, v_src, dout_src, levels_ptr, delta_ptr, dq_ptr,
    ranges_ptr, q_order_ptr, k_order_ptr, q_documents_ptr, k_documents_ptr, range_stride,
    num_queries, num_keys, num_kv_heads, group, num_tiles, padded, window, scale, soft_cap,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, HEAD: tl.constexpr, REST: tl.constexpr,
    VALUE: tl.constexpr, TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile = num_tiles - 1 - tl.program_id(0) % num_tiles
    batch_head, num_heads = tl.program_id(0) // num_tiles, num_kv_heads * group
    batch, head = batch_head // num_heads, batch_head % num_heads
    start_m = tile * BLOCK_M
    rows = start_m + tl.arange(0, BLOCK_M)
    inside = rows < num_queries
    q = tile_of(q_src, batch, head, start_m, num_queries, num_heads, BLOCK_M, 0, HEAD, HEAD + REST, TMA)
    dout = tile_of(dout_src, batch, head, start_m, num_queries, num_heads, BLOCK_M, 0, VALUE, VALUE, TMA)
    dq = tl.zeros([BLOCK_M, HEAD], tl.float32)
    q_rest, dq_rest = q, tl.zeros([BLOCK_M], tl.float32)
    if REST > 0:
        q_rest = tile_of(q_rest_src, batch, head, start_m, num_queries, num_heads, BLOCK_M, HEAD, REST, HEAD + REST, TMA)
        dq_rest = tl.zeros([BLOCK_M, REST], tl.float32)
    place = batch_head.to(tl.int64) * padded + rows
    level, delta = tl.load(levels_ptr + place), tl.load(delta_ptr + place)
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
    kv_head = head // group
    for start in tl.range(full_first, full_last, BLOCK_N):
        dq, dq_rest = _accumulate_dq(
            dq, dq_rest, q, q_rest, dout, level, delta, k_src, k_rest_src, v_src, batch, kv_head, start,
            q_order, q_documents, k_order_ptr, k_documents_ptr, num_keys, num_kv_heads, window, scale, soft_cap,
            False, CAUSAL, WINDOW, SOFT_CAP, HEAD, REST, VALUE, TMA, BLOCK_N,
        )  # fmt: skip
    for edge in tl.range(0, (full_first - first) + (last - full_last), BLOCK_N):
        start = step(edge, first, full_first, full_last)
        dq, dq_rest = _accumulate_dq(
            dq, dq_rest, q, q_rest, dout, level, delta, k_src, k_rest_src, v_src, batch, kv_head, start,
            q_order, q_documents, k_order_ptr, k_documents_ptr, num_keys, num_kv_heads, window, scale, soft_cap,
            True, CAUSAL, WINDOW, SOFT_CAP, HEAD, REST, VALUE, TMA, BLOCK_N,
        )  # fmt: skip
    where = ((batch.to(tl.int64) * num_queries + rows) * num_heads + head)[:, None]
    dq_ptrs = dq_ptr + where * (HEAD + REST) + tl.arange(0, HEAD)[None, :]
    tl.store(dq_ptrs, (dq * scale).to(dq_ptr.dtype.element_ty), mask=inside[:, None])
    if REST > 0:
        rest_ptrs = dq_ptr + where * (HEAD + REST) + HEAD + tl.arange(0, REST)[None, :]
        tl.store(rest_ptrs, (dq_rest * scale).to(dq_ptr.dtype.element_ty), mask=inside[:, None])
