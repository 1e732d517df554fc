"""Which pairs of tiles attention works on: for a tile of queries the range of keys that it sees, and the same from the keys.

A range is (first, full_first, full_last, last): no row of the tile sees anything outside [first, last), and every row sees all of
[full_first, full_last). All four are multiples of the other side's size of tiles. Where orders are 0, 1, 2, ... and there are no
documents, ranges follow from the position of the tile; otherwise a small kernel finds them on the device from orders and
documents. The same kernel serves both sides: seen from the keys, orders are negated, which turns their distances around.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpar.kernels._launch import launch
from mpar.kernels._table import Tuning

__all__ = ["key_range", "query_range", "step", "tile_ranges", "visible"]

FAR = tl.constexpr(2**62)


@triton.jit
def visible(q_order, k_order, q_documents, k_documents, inside, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Which pairs see each other; operands broadcast, documents are None or ids."""
    seen = inside
    if CAUSAL:
        seen = seen & (k_order <= q_order)
    if WINDOW:
        seen = seen & (q_order - k_order < window)
    if q_documents is not None:
        seen = seen & (q_documents == k_documents) & (q_documents != -1)
    return seen


@triton.jit
def _load_range(ranges_ptr, index):
    ranges = ranges_ptr + index * 4
    return tl.load(ranges), tl.load(ranges + 1), tl.load(ranges + 2), tl.load(ranges + 3)


@triton.jit
def _whole(first, full_first, full_last, last):
    """The same range where no tile is seen by all: then its full part is empty, and lies at its start."""
    some = full_first < full_last
    return first, tl.where(some, full_first, first), tl.where(some, full_last, first), tl.maximum(last, first)


@triton.jit
def key_range(
    ranges_ptr, index, start, num_queries, num_keys, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The keys of the tile of queries that begins at `start`."""
    if ranges_ptr is not None:
        return _load_range(ranges_ptr, index)
    end = tl.minimum(start + BLOCK_M, num_queries)
    first, full_first, full_last, last = 0, 0, num_keys, num_keys
    if CAUSAL:
        last = tl.minimum(last, end)
        full_last = tl.minimum(full_last, start + 1)
    if WINDOW:
        first = tl.minimum(tl.maximum(start - window + 1, 0), last)
        full_first = tl.maximum(end - window, 0)
    return _whole(
        first // BLOCK_N * BLOCK_N,
        tl.cdiv(full_first, BLOCK_N) * BLOCK_N,
        full_last // BLOCK_N * BLOCK_N,
        tl.cdiv(last, BLOCK_N) * BLOCK_N,
    )


@triton.jit
def query_range(
    ranges_ptr, index, start, num_queries, num_keys, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The queries of the tile of keys that begins at `start`. Rows after the last query do no harm: their probabilities are 0."""
    if ranges_ptr is not None:
        return _load_range(ranges_ptr, index)
    end = tl.minimum(start + BLOCK_N, num_keys)
    padded = tl.cdiv(num_queries, BLOCK_M) * BLOCK_M
    first, full_first, full_last, last = 0, 0, padded, padded
    if CAUSAL:
        first = tl.minimum(start, last)
        full_first = end - 1
    if WINDOW:
        last = tl.minimum(last, end - 1 + window)
        full_last = tl.minimum(full_last, start + window)
    return _whole(
        first // BLOCK_M * BLOCK_M,
        tl.cdiv(full_first, BLOCK_M) * BLOCK_M,
        full_last // BLOCK_M * BLOCK_M,
        tl.cdiv(last, BLOCK_M) * BLOCK_M,
    )


@triton.jit
def step(edge, first, full_first, full_last):
    """Where the tile `edge` after the first lies, of those that need a mask: they are before and after the full ones."""
    start = first + edge
    return tl.where(start < full_first, start, start + (full_last - full_first))


@triton.jit
def _attention_ranges(
    order_ptr, other_order_ptr, documents_ptr, other_documents_ptr, ranges_ptr, size, other_size, num_tiles, window, multiple,
    FROM_KEYS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    sign = -1 if FROM_KEYS else 1
    rows = tile * TILE + tl.arange(0, TILE)
    inside = rows < size
    order = rows.to(tl.int64)
    if order_ptr is not None:
        order = tl.load(order_ptr + rows, mask=inside, other=0).to(tl.int64)
    order = order * sign
    low, high = tl.min(tl.where(inside, order, FAR)), tl.max(tl.where(inside, order, -FAR))
    if documents_ptr is not None:
        documents = tl.load(documents_ptr + batch * size + rows, mask=inside, other=-1).to(tl.int64)
        known = inside & (documents != -1)
        low_document, high_document = tl.min(tl.where(known, documents, FAR)), tl.max(tl.where(known, documents, -FAR))
        uniform = (low_document == high_document) & (tl.sum((inside & (documents == -1)).to(tl.int32)) == 0)
    else:
        low_document, high_document, uniform = 0, 0, True
    first, last = tl.full([BLOCK], 2147483647, tl.int32), tl.zeros([BLOCK], tl.int32)
    full_first, full_last, count = first, last, last
    for start in tl.range(0, other_size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        any_row = columns < other_size
        other = columns.to(tl.int64)
        if other_order_ptr is not None:
            other = tl.load(other_order_ptr + columns, mask=any_row, other=0).to(tl.int64)
        other = other * sign
        every_row = any_row & uniform
        if CAUSAL:
            any_row, every_row = any_row & (other <= high), every_row & (other <= low)
        if WINDOW:
            any_row, every_row = any_row & (low - other < window), every_row & (high - other < window)
        if other_documents_ptr is not None:
            ids = tl.load(other_documents_ptr + batch * other_size + columns, mask=columns < other_size, other=-1).to(tl.int64)
            any_row = any_row & (ids != -1) & (ids >= low_document) & (ids <= high_document)
            every_row = every_row & (ids == low_document)
        first = tl.where(any_row, tl.minimum(first, columns), first)
        last = tl.where(any_row, tl.maximum(last, columns + 1), last)
        full_first = tl.where(every_row, tl.minimum(full_first, columns), full_first)
        full_last = tl.where(every_row, tl.maximum(full_last, columns + 1), full_last)
        count += every_row.to(tl.int32)
    full_begin, full_end = tl.min(full_first), tl.max(full_last)
    contiguous = tl.sum(count) == full_end - full_begin
    end = tl.max(last)
    begin = tl.minimum(tl.min(first), end) // multiple * multiple
    if FROM_KEYS:  # rows after the last query do no harm
        full_end = tl.where(full_end == other_size, tl.cdiv(full_end, multiple) * multiple, full_end)
    full_begin = tl.cdiv(tl.minimum(full_begin, full_end), multiple) * multiple
    full_end = tl.where(contiguous, full_end // multiple * multiple, 0)
    begin, full_begin, full_end, end = _whole(begin, full_begin, full_end, tl.cdiv(end, multiple) * multiple)
    ranges = ranges_ptr + (batch * num_tiles + tile) * 4
    tl.store(ranges, begin)
    tl.store(ranges + 1, full_begin)
    tl.store(ranges + 2, full_end)
    tl.store(ranges + 3, end)


Side = tuple[Tensor | None, Tensor | None, int, int]
"""The queries or the keys: their orders, their documents, the number of rows, and the size of a tile."""


def tile_ranges(
    near: Side, far: Side, *, from_keys: bool, causal: bool, window: int | None, on: Tensor, tuning: Tuning
) -> Tensor | None:
    """For all tiles of the near side their ranges of the far side, (B or 1, number of tiles, 4) int32; None where ranges follow
    from the position of the tile. The near side is that of the queries, or with `from_keys` that of the keys."""
    (order, documents, size, tile), (far_order, far_documents, far_size, far_tile) = near, far
    if order is None and far_order is None and documents is None:
        return None
    num_tiles, num_rows = triton.cdiv(size, tile), 1 if documents is None else documents.shape[0]
    ranges = torch.empty((num_rows, num_tiles, 4), dtype=torch.int32, device=on.device)
    launch(
        _attention_ranges,
        (num_tiles, num_rows),
        order,
        far_order,
        documents,
        far_documents,
        ranges,
        size,
        far_size,
        num_tiles,
        0 if window is None else window,
        far_tile,
        on=on,
        tuning=tuning,
        FROM_KEYS=from_keys,
        CAUSAL=causal,
        WINDOW=window is not None,
        TILE=tile,
    )
    return ranges
