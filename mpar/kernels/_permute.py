"""Permute: a stable counting sort of slots by expert, and the moves of rows of tokens into the order of experts and back.

The sort has three kernels. The first counts how often each expert occurs in every chunk of slots. The second finds where each
chunk's slots of an expert begin. The third counts for every slot the slots of the same expert before it in its chunk. There are
no atomics, so slots of an expert stay in their order. Bandwidth-bound: `permute` reads a token once and writes it K times,
`unpermute` reads K rows and writes one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpar.errors import KernelError
from mpar.kernels._launch import arch_of, launch, tuned
from mpar.kernels._moe_support import expert_order_supports, rows_support

__all__ = ["expert_order", "permute", "unpermute", "unpermute_bwd"]

CHUNK = 1024
"""The number of slots of a chunk."""


@triton.jit
def _load_experts(experts_ptr, slots, num_slots, NUM_EXPERTS: tl.constexpr):
    """Experts of slots; NUM_EXPERTS for those that go to none."""
    experts = tl.load(experts_ptr + slots, mask=slots < num_slots, other=-1)
    return tl.where((experts >= 0) & (experts < NUM_EXPERTS), experts, NUM_EXPERTS).to(tl.int32)


@triton.jit
def _count(experts_ptr, counts_ptr, num_slots, NUM_EXPERTS: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr):
    """counts[chunk, expert]"""
    chunk = tl.program_id(0).to(tl.int64)
    experts = _load_experts(experts_ptr, chunk * CHUNK + tl.arange(0, CHUNK), num_slots, NUM_EXPERTS)
    tl.store(counts_ptr + chunk * BINS + tl.arange(0, BINS), tl.histogram(experts, BINS))


@triton.jit
def _scan(
    counts_ptr,
    starts_ptr,
    totals_ptr,
    ends_ptr,
    num_chunks,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Replace counts[chunk, expert] by their sum over earlier chunks; starts, totals and ends of experts from the whole sums."""
    rows: tl.constexpr = ELEMENTS // BINS
    bins = tl.arange(0, BINS)
    totals = tl.zeros([BINS], tl.int32)
    for first in range(0, num_chunks, rows):
        chunks = first + tl.arange(0, rows)[:, None]
        places = counts_ptr + chunks.to(tl.int64) * BINS + bins[None, :]
        counts = tl.load(places, mask=chunks < num_chunks, other=0)
        tl.store(places, totals[None, :] + tl.cumsum(counts, 0) - counts, mask=chunks < num_chunks)
        totals += tl.sum(counts, 0)
    ends = tl.cumsum(totals, 0)
    tl.store(starts_ptr + bins, ends - totals)
    tl.store(totals_ptr + bins, totals, mask=bins < NUM_EXPERTS)
    tl.store(ends_ptr + bins, ends, mask=bins < NUM_EXPERTS)


@triton.jit
def _place(
    experts_ptr, counts_ptr, starts_ptr, order_ptr, inverse_ptr, num_slots,
    NUM_EXPERTS: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A slot's row: the start of its expert, its slots in earlier chunks, and those before it in its own."""
    block = tl.program_id(0).to(tl.int64)
    chunk = block * BLOCK // CHUNK
    slots = block * BLOCK + tl.arange(0, BLOCK)
    experts = _load_experts(experts_ptr, slots, num_slots, NUM_EXPERTS)
    places = tl.load(starts_ptr + experts) + tl.load(counts_ptr + chunk * BINS + experts)
    for first in range(chunk * CHUNK, block * BLOCK + 1, BLOCK):
        others = first + tl.arange(0, BLOCK)
        equal = experts[:, None] == _load_experts(experts_ptr, others, num_slots, NUM_EXPERTS)[None, :]
        places += tl.sum((equal & (others[None, :] < slots[:, None])).to(tl.int32), 1)
    tl.store(inverse_ptr + slots, places, mask=slots < num_slots)
    tl.store(order_ptr + places, slots.to(tl.int32), mask=slots < num_slots)


@triton.jit
def _permute(x_ptr, inverse_ptr, rows_ptr, num_rows, D, K: tl.constexpr, BLOCK: tl.constexpr):
    """One program per token and block of columns: read once, written K times."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token * D + columns, mask=columns < D, other=0.0)
    for k in tl.static_range(K):
        row = tl.load(inverse_ptr + token * K + k).to(tl.int64)
        tl.store(rows_ptr + row * D + columns, x, mask=columns < tl.where((row >= 0) & (row < num_rows), D, 0))


@triton.jit
def _unpermute(rows_ptr, inverse_ptr, weights_ptr, y_ptr, num_rows, D, K: tl.constexpr, BLOCK: tl.constexpr):
    """One program per token and block of columns: K rows are read and added up in the order of slots."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        row = tl.load(inverse_ptr + token * K + k).to(tl.int64)
        inside = columns < tl.where((row >= 0) & (row < num_rows), D, 0)
        x = tl.load(rows_ptr + row * D + columns, mask=inside, other=0.0).to(tl.float32)
        if weights_ptr is not None:
            x *= tl.load(weights_ptr + token * K + k).to(tl.float32)
        y += x
    tl.store(y_ptr + token * D + columns, y.to(y_ptr.dtype.element_ty), mask=columns < D)


@triton.jit
def _unpermute_bwd(
    rows_ptr, inverse_ptr, weights_ptr, dy_ptr, drows_ptr, dweights_ptr, num_rows, D,
    K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per token: its K rows side by side, block of columns after block."""
    token = tl.program_id(0).to(tl.int64)
    slots = token * K + tl.arange(0, BLOCK_K)
    used = tl.arange(0, BLOCK_K) < K
    row = tl.load(inverse_ptr + slots, mask=used, other=-1).to(tl.int64)
    used = used & (row >= 0) & (row < num_rows)
    weights = tl.load(weights_ptr + slots, mask=used, other=0.0).to(tl.float32)
    products = tl.zeros([BLOCK_K, BLOCK], tl.float32)
    for first in range(0, D, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        dy = tl.load(dy_ptr + token * D + columns, mask=columns < D, other=0.0).to(tl.float32)
        offsets = row[:, None] * D + columns[None, :]
        inside = used[:, None] & (columns < D)[None, :]
        products += tl.load(rows_ptr + offsets, mask=inside, other=0.0).to(tl.float32) * dy[None, :]
        tl.store(drows_ptr + offsets, (weights[:, None] * dy[None, :]).to(drows_ptr.dtype.element_ty), mask=inside)
    dweights = tl.sum(products, 1)
    tl.store(dweights_ptr + slots, dweights.to(dweights_ptr.dtype.element_ty), mask=tl.arange(0, BLOCK_K) < K)


def expert_order(experts: Tensor, *, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Order, inverse, counts and offsets; see `mpar.ops.expert_order`."""
    _refuse("expert_order", expert_order_supports(arch_of(experts), experts, num_experts=num_experts))
    experts = experts.contiguous()
    num_slots, num_chunks = experts.numel(), triton.cdiv(experts.numel(), CHUNK)
    bins = max(32, triton.next_power_of_2(num_experts + 1))
    order, inverse, counts, ends, by_chunk, starts = (
        torch.empty(shape, dtype=torch.int32, device=experts.device)
        for shape in ((num_slots,), experts.shape, (num_experts,), (num_experts,), (num_chunks, bins), (bins,))
    )
    blocks = {"NUM_EXPERTS": num_experts, "BINS": bins}
    entry, scan, place = (tuned(name, experts) for name in ("expert_order_count", "expert_order_scan", "expert_order_place"))
    if num_slots:
        launch(_count, (num_chunks,), experts, by_chunk, num_slots, on=experts, tuning=entry, CHUNK=CHUNK, **blocks)
    launch(_scan, (1,), by_chunk, starts, counts, ends, num_chunks, on=experts, tuning=scan, **blocks)
    if num_slots:
        operands = (experts, by_chunk, starts, order, inverse, num_slots)
        grid = (triton.cdiv(num_slots, place.blocks["BLOCK"]),)
        launch(_place, grid, *operands, on=experts, tuning=place, CHUNK=CHUNK, **blocks)
    return order, inverse, counts, ends


def permute(x: Tensor, inverse: Tensor) -> Tensor:
    """The rows of tokens in the order of experts; see `mpar.ops.permute`."""
    _refuse("permute", rows_support(arch_of(x), x, inverse))
    x, inverse, size = x.contiguous(), inverse.contiguous(), x.shape[1]
    rows = torch.empty((inverse.numel(), size), dtype=x.dtype, device=x.device)
    entry = tuned("permute", x)
    if rows.numel():
        grid = (x.shape[0], triton.cdiv(size, entry.blocks["BLOCK"]))
        launch(_permute, grid, x, inverse, rows, rows.shape[0], size, on=x, tuning=entry, K=inverse.shape[1])
    return rows


def unpermute(rows: Tensor, inverse: Tensor, weights: Tensor | None) -> Tensor:
    """Weighted sums of the rows of each token; see `mpar.ops.unpermute`."""
    _refuse("unpermute", rows_support(arch_of(rows), rows, inverse, weights))
    rows, inverse, size = rows.contiguous(), inverse.contiguous(), rows.shape[1]
    weights = None if weights is None else weights.contiguous()
    y = torch.empty((inverse.shape[0], size), dtype=rows.dtype, device=rows.device)
    entry = tuned("unpermute", rows)
    if y.numel():
        grid = (y.shape[0], triton.cdiv(size, entry.blocks["BLOCK"]))
        launch(_unpermute, grid, rows, inverse, weights, y, rows.shape[0], size, on=rows, tuning=entry, K=inverse.shape[1])
    return y


def unpermute_bwd(rows: Tensor, inverse: Tensor, weights: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of rows and weights."""
    _refuse("unpermute_bwd", rows_support(arch_of(rows), rows, inverse, weights, dy))
    rows, inverse, weights, dy = (x.contiguous() for x in (rows, inverse, weights, dy))
    drows, dweights = torch.empty_like(rows), torch.empty_like(weights)
    entry = tuned("unpermute_bwd", rows)
    if inverse.numel():
        operands = (rows, inverse, weights, dy, drows, dweights, *rows.shape)
        blocks = {"K": inverse.shape[1], "BLOCK_K": triton.next_power_of_2(inverse.shape[1])}
        launch(_unpermute_bwd, (inverse.shape[0],), *operands, on=rows, tuning=entry, **blocks)
    return drows, dweights


def _refuse(primitive: str, reason: str | None) -> None:
    if reason is not None:
        raise KernelError(f"{primitive}: {reason}")
