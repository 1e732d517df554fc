"""Paged attention: each Triton program has neighbouring tokens of one row, all query heads of one kv head, and a part of the row.

So keys and values are loaded once for a group of heads, and once for several tokens of a prompt. Parts have a fixed length
(flash-decoding, Dao et al. 2023), by which a second kernel puts them together: few tokens still occupy a chip. Bound by
bandwidth where each row has one token: 2 H elements for each position of a row and kv head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpar.errors import KernelError
from mpar.kernels._attention_forward import scores_of
from mpar.kernels._launch import arch_of, launch, tuned
from mpar.kernels._paged_attention_support import HEADS, paged_attention_supports, split_length

__all__ = ["paged_attention"]

LOG2_E = tl.constexpr(1.4426950408889634)
FAR = tl.constexpr(2**31 - 1)


@triton.jit
def _load_rows(x_ptr, offsets, there, FROM: tl.constexpr, WIDTH: tl.constexpr):
    """`WIDTH` features from `FROM` of the rows that begin at `offsets`; zeros for those that are not there."""
    return tl.load(x_ptr + offsets[:, None] + (FROM + tl.arange(0, WIDTH))[None, :], mask=there[:, None], other=0.0)


@triton.jit
def _with_sink(top, total, sink, there):
    """`(top, total, decay)` with one more key, whose value is zero, for the rows that are there. All are in base 2."""
    sink = tl.where(there, sink.to(tl.float32) * LOG2_E, float("-inf"))
    new_top = tl.maximum(top, sink)
    level = tl.where(new_top == float("-inf"), 0.0, new_top)
    decay = tl.exp2(top - level)
    return new_top, total * decay + tl.exp2(sink - level), decay


@triton.jit
def _paged_attention_fwd(
    q_ptr, k_ptr, v_ptr, rows_ptr, positions_ptr, pages_ptr, sinks_ptr, out_ptr, lse_ptr,
    num_tokens, num_rows, row_pages, num_pages, num_kv_heads, group, pool_stride, place_stride, head_stride,
    split, window, scale, soft_cap,
    SHARD: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, SAME: tl.constexpr, FINAL: tl.constexpr,
    PAGE: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, REST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A tile has at most TOKENS tokens from a multiple of TOKENS on. The program of its first token computes it, others end.

    SAME: the keys are the values, and are loaded once. FINAL: there is one part, and so `out` and `lse` are the results;
    otherwise they have a number for each part.
    """
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    token, part = tl.program_id(0), tl.program_id(2)
    blocks, num_heads = tl.cdiv(group, GROUP), num_kv_heads * group
    kv_head = tl.program_id(1) // blocks % num_kv_heads
    batch = (tl.program_id(1) // blocks // num_kv_heads).to(tl.int64)
    rows_ptr += batch * num_tokens
    row = tl.load(rows_ptr + token)
    before = tl.load(rows_ptr + tl.maximum(token - 1, 0))
    if (token % TOKENS > 0) & (before == row):
        return
    m = tl.arange(0, BLOCK_M)
    tokens, in_group = token + m // GROUP, tl.program_id(1) % blocks * GROUP + m % GROUP
    inside = (tokens < num_tokens) & (tokens // TOKENS == token // TOKENS)
    inside = inside & (tl.load(rows_ptr + tokens, mask=inside, other=0) == row)
    positions = tl.load(positions_ptr + batch * num_tokens + tokens, mask=inside, other=0).to(tl.int32)
    known = inside & (row >= 0)
    first, end = part * split, tl.minimum(part * split + split, tl.max(tl.where(known, positions + 1, 0)))
    low = 0
    if WINDOW:
        low = tl.maximum(tl.min(tl.where(known, positions, FAR)) - window + 1, 0)
        first = tl.maximum(first, low // BLOCK_N * BLOCK_N)
    if not FINAL:  # noqa: SIM102  # known when this is compiled, unlike the other condition
        if first >= end:
            return
    inside = inside & (in_group < group)
    head = kv_head * group + in_group
    where = (batch * num_tokens + tokens) * num_heads + head
    q = _load_rows(q_ptr, where * (HEAD + REST), inside, 0, HEAD)
    acc = tl.zeros([BLOCK_M, HEAD], tl.float32)
    if REST > 0:
        q_rest = _load_rows(q_ptr, where * (HEAD + REST), inside, HEAD, REST)
        acc_rest = tl.zeros([BLOCK_M, REST], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    pages_ptr += (batch * num_rows + row) * row_pages
    pool = batch * pool_stride + kv_head.to(tl.int64) * head_stride
    for start in tl.range(first, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        there = (keys >= low) & (keys < end)
        page = tl.load(pages_ptr + keys // PAGE, mask=there, other=0)
        if SHARD:
            there = there & (page >= 0) & (page < num_pages)
        places = pool + (page * PAGE + keys % PAGE) * place_stride
        k = _load_rows(k_ptr, places, there, 0, HEAD)
        products = tl.dot(q, k.T, input_precision="ieee")
        if REST > 0:
            k_rest = _load_rows(k_ptr, places, there, HEAD, REST)
            products = tl.dot(q_rest, k_rest.T, products, input_precision="ieee")
        scores, _, factor = scores_of(products, scale, soft_cap, SOFT_CAP)
        seen = there[None, :] & (keys[None, :] <= positions[:, None])
        if WINDOW:
            seen = seen & (positions[:, None] - keys[None, :] < window)
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * factor)
        level = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen nothing: -inf - -inf would be NaN
        p = tl.exp2(scores * factor - level[:, None])
        decay = tl.exp2(top - level)
        total = total * decay + tl.sum(p, 1)
        top = new_top
        weights = p.to(q.dtype)
        v = k if SAME else _load_rows(v_ptr, places, there, 0, HEAD)
        acc = tl.dot(weights, v, acc * decay[:, None], input_precision="ieee")
        if REST > 0:
            v_rest = k_rest if SAME else _load_rows(v_ptr, places, there, HEAD, REST)
            acc_rest = tl.dot(weights, v_rest, acc_rest * decay[:, None], input_precision="ieee")
    if sinks_ptr is not None and FINAL:
        sink = tl.load(sinks_ptr + head, mask=inside, other=0.0)
        top, total, decay = _with_sink(top, total, sink, known)
        acc = acc * decay[:, None]
        if REST > 0:
            acc_rest = acc_rest * decay[:, None]
    blind = total == 0
    share = 1 / tl.where(blind, 1.0, total)
    lse = tl.where(blind, float("-inf"), top + tl.log2(total))
    if FINAL:
        lse = lse / LOG2_E
    else:
        where = where * tl.num_programs(2) + part
    tl.store(lse_ptr + where, lse, mask=inside)
    out = out_ptr + where[:, None] * (HEAD + REST)
    element: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(out + tl.arange(0, HEAD)[None, :], (acc * share[:, None]).to(element), mask=inside[:, None])
    if REST > 0:
        tl.store(out + (HEAD + tl.arange(0, REST))[None, :], (acc_rest * share[:, None]).to(element), mask=inside[:, None])


@triton.jit
def _paged_attention_merge(
    parts_ptr, part_lse_ptr, rows_ptr, positions_ptr, sinks_ptr, out_ptr, lse_ptr, num_heads, num_parts, split, window,
    WINDOW: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Some features of one head of one token: the average of the parts that it sees, weighted by their sums of exponentials."""
    where = tl.program_id(0).to(tl.int64)
    token, head = where // num_heads, where % num_heads
    row, position = tl.load(rows_ptr + token), tl.load(positions_ptr + token)
    part = tl.arange(0, PARTS)
    last = tl.where(row >= 0, position // split, -1)
    used = (part <= last) & (part < num_parts)
    if WINDOW:
        used = used & (part >= tl.maximum(position - window + 1, 0) // split)
    lse = tl.load(part_lse_ptr + where * num_parts + part, mask=used, other=float("-inf"))
    features = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    values = (where * num_parts + part)[:, None] * SIZE + features[None, :]
    values = tl.load(parts_ptr + values, mask=used[:, None], other=0.0)
    top = tl.max(lse, 0)
    level = tl.where(top == float("-inf"), 0.0, top)
    shares = tl.exp2(lse - level)
    total = tl.sum(shares, 0)
    out = tl.sum(shares[:, None] * values, 0)
    if sinks_ptr is not None:
        top, total, decay = _with_sink(level, total, tl.load(sinks_ptr + head), row >= 0)
        out = out * decay
        level = tl.where(top == float("-inf"), 0.0, top)
    blind = total == 0
    out = out / tl.where(blind, 1.0, total)
    tl.store(out_ptr + where * SIZE + features, out.to(out_ptr.dtype.element_ty))
    if tl.program_id(1) == 0:
        tl.store(lse_ptr + where, tl.where(blind, float("-inf"), (level + tl.log2(total)) / LOG2_E))


def paged_attention(
    q, k, v, rows, positions, pages, sinks, *, shard, page_size, window, scale, soft_cap
) -> tuple[Tensor, Tensor]:
    """Attention to keys and values in pages, and its log-sum-exp; see `mpar.ops.paged_attention`."""
    reason = paged_attention_supports(arch_of(q), q, k, scale=scale)
    if reason is not None:
        raise KernelError(f"paged_attention of q {tuple(q.shape)}, k {tuple(k.shape)}: {reason}. Use mpar.ops.paged_attention.")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if not lse.numel():
        return out, lse
    if not pages.numel() or not k.numel():
        return out.zero_(), lse.fill_(-torch.inf)
    split, number = split_length(q, k, pages, page_size, window)
    order = rows.contiguous(), positions.contiguous()
    sinks = None if sinks is None else sinks.contiguous()
    window_size = None if window is None else min(window, 2**30)
    parts = out, lse
    if number > 1:
        parts = tuple(q.new_empty((*x.shape[:3], number, *x.shape[3:]), dtype=torch.float32) for x in parts)
    given = {"shard": shard, "page_size": page_size, "window": window_size, "scale": scale, "soft_cap": soft_cap}
    _launch_parts(q.contiguous(), k, v, *order, pages.contiguous(), sinks, *parts, split, number, **given)
    if number > 1:
        _launch_merge(*parts, *order, sinks, out, lse, split, window_size)
    return out, lse


def _launch_parts(
    q, k, v, rows, positions, pages, sinks, out, lse, split, number, *, shard, page_size, window, scale, soft_cap
) -> None:
    """Attention to each of `number` parts of rows; to the only part, if there is one."""
    (B, T, N, H), (P, K), same = q.shape, k.shape[1:3], k is v
    k, v = _loadable(k, v)
    entry, group = tuned("paged_attention_fwd", q, f"{H} float32" if q.dtype == torch.float32 else str(H)), N // K
    group_block = min(triton.next_power_of_2(group), entry.blocks["BLOCK_M"])
    launch(
        _paged_attention_fwd,
        (T, B * K * triton.cdiv(group, group_block), number),
        *(q, k, k if same else v, rows, positions, pages, sinks, out, lse),
        *(T, *pages.shape[1:], P // page_size, K, group, *k.stride()[:3], split),
        *(0 if window is None else window, scale, 0.0 if soft_cap is None else soft_cap),
        on=q,
        tuning=entry,
        SHARD=shard,
        WINDOW=window is not None,
        SOFT_CAP=soft_cap is not None,
        SAME=same,
        FINAL=number == 1,
        PAGE=page_size,
        GROUP=group_block,
        HEAD=HEADS[H][0],
        REST=HEADS[H][1],
    )


def _launch_merge(parts, part_lse, rows, positions, sinks, out, lse, split, window) -> None:
    """Put the results of all parts together."""
    B, T, N, number, H = parts.shape
    entry = tuned("paged_attention_merge", parts)
    launch(
        _paged_attention_merge,
        (B * T * N, H // entry.blocks["FEATURES"]),
        *(parts, part_lse, rows, positions, sinks, out, lse, N, number, split, 0 if window is None else window),
        on=out,
        tuning=entry,
        WINDOW=window is not None,
        SIZE=H,
        PARTS=triton.next_power_of_2(number),
    )


def _loadable(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The pools if both have the same strides and rows that begin at multiples of 16 bytes; else copies."""
    unit = 16 // k.element_size()
    fits = all(x.stride(3) == 1 and x.data_ptr() % 16 == 0 and not any(n % unit for n in x.stride()[:3]) for x in (k, v))
    return (k, v) if fits and k.stride() == v.stride() else (k.contiguous(), v.contiguous())
