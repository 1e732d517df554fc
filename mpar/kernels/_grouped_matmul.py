"""Grouped matrix product: one kernel lists tiles of rows on the device, from the ends of groups; a second one multiplies them.

The host need not know how large groups are: R rows in E groups, and rows after all groups, have less than R / BLOCK_M + E + 1
tiles. For the gradient of the weights, each Triton program has one tile of an expert's weights and goes through all rows of that
expert, so that no atomics are needed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpar.errors import KernelError
from mpar.kernels._launch import arch_of, describe, launch, tuned
from mpar.kernels._moe_support import grouped_matmul_supports, grouped_mm_supports, loadable
from mpar.torch_private import grouped_mm as torch_grouped_mm

__all__ = [
    "grouped_matmul",
    "grouped_matmul_by_torch",
    "grouped_matmul_dw",
    "grouped_matmul_dw_by_torch",
    "zero_rest",
]

INTERPRETED_PROGRAMS = 3
"""How many Triton programs share the tiles where there is no GPU, whose number of multiprocessors it would otherwise be."""


@triton.jit
def _list_tiles(
    offsets_ptr, tiles_ptr, num_rows, num_tiles,
    NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """tiles[0..2, tile]: expert (or -1: rows that belong to none), first row, end of the rows; an empty tile has end 0.

    Parts of the rows: one part per expert, those after.
    """
    part = tl.arange(0, BLOCK_E)
    ends = tl.load(offsets_ptr + part, mask=part < NUM_EXPERTS, other=0).to(tl.int32)
    ends = tl.minimum(tl.maximum(tl.where(part < NUM_EXPERTS, ends, num_rows), 0), num_rows)
    begins = tl.load(offsets_ptr + part - 1, mask=(part > 0) & (part <= NUM_EXPERTS), other=0).to(tl.int32)
    begins = tl.minimum(tl.maximum(begins, 0), num_rows)
    sizes = tl.where(part <= NUM_EXPERTS, tl.maximum(ends - begins, 0), 0)
    counts = (sizes + BLOCK_M - 1) // BLOCK_M
    lasts = tl.cumsum(counts, 0)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    of_tile = tl.sum((lasts[None, :] <= tile[:, None]).to(tl.int32), 1)
    mine = part[None, :] == of_tile[:, None]
    begin = tl.sum(tl.where(mine, begins[None, :], 0), 1)
    end = tl.sum(tl.where(mine, ends[None, :], 0), 1)
    first = tl.sum(tl.where(mine, (lasts - counts)[None, :], 0), 1)
    expert = tl.where(of_tile < NUM_EXPERTS, of_tile, -1)
    tl.store(tiles_ptr + tile, expert, mask=tile < num_tiles)
    tl.store(tiles_ptr + num_tiles + tile, begin + (tile - first) * BLOCK_M, mask=tile < num_tiles)
    tl.store(tiles_ptr + 2 * num_tiles + tile, end, mask=tile < num_tiles)


@triton.jit
def _load(x, row, column, num_rows, num_columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr):
    """A tile of `x`: zeros outside. `x` is a descriptor where the chip loads by it, else a pointer."""
    if TMA:
        tile = x.load([row, column])
    else:
        rows, columns = row + tl.arange(0, ROWS)[:, None], column + tl.arange(0, COLUMNS)[None, :]
        inside = (rows < num_rows) & (columns < num_columns)
        tile = tl.load(x + rows.to(tl.int64) * stride + columns, mask=inside, other=0.0)
    return tile


@triton.jit
def _load_weights(
    w, expert, k, column, D, F, expert_stride, stride,
    K: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """A tile [K, N] of the weights of an expert, which are stored as [D, F], or as [F, D] where TRANSPOSED."""
    if TMA and TRANSPOSED:
        tile = w.load([expert, column, k]).reshape(N, K).trans()
    elif TMA:
        tile = w.load([expert, k, column]).reshape(K, N)
    elif TRANSPOSED:
        tile = _load(w + expert.to(tl.int64) * expert_stride, column, k, F, D, stride, N, K, False).trans()
    else:
        tile = _load(w + expert.to(tl.int64) * expert_stride, k, column, D, F, stride, K, N, False)
    return tile


@triton.jit
def _grouped_matmul(
    x, w, y_ptr, tiles_ptr, num_tiles, num_rows, D, F, x_stride, w_expert_stride, w_stride,
    TRANSPOSED: tl.constexpr, TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """Programs walk through bands of BAND tiles of rows by all columns, rows first: neighbours share weights in the L2 cache."""
    num_columns = tl.cdiv(F, BLOCK_N)
    for work in tl.range(tl.program_id(0), num_tiles * num_columns, tl.num_programs(0)):
        first = work // (BAND * num_columns) * BAND
        height = tl.minimum(num_tiles - first, BAND)
        tile = first + work % (BAND * num_columns) % height
        column = work % (BAND * num_columns) // height * BLOCK_N
        expert, row = tl.load(tiles_ptr + tile), tl.load(tiles_ptr + num_tiles + tile)
        end = tl.load(tiles_ptr + 2 * num_tiles + tile)
        if row < end:
            y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for k in tl.range(0, tl.where(expert >= 0, D, 0), BLOCK_K):
                rows_MK = _load(x, row, k, num_rows, D, x_stride, BLOCK_M, BLOCK_K, TMA)
                w_KN = _load_weights(w, expert, k, column, D, F, w_expert_stride, w_stride, BLOCK_K, BLOCK_N, TRANSPOSED, TMA)
                y = tl.dot(rows_MK, w_KN, y, input_precision="ieee")
            rows = row + tl.arange(0, BLOCK_M)[:, None]
            columns = column + tl.arange(0, BLOCK_N)[None, :]
            places = y_ptr + rows.to(tl.int64) * F + columns
            tl.store(places, y.to(y_ptr.dtype.element_ty), mask=(rows < end) & (columns < F))


@triton.jit
def _grouped_matmul_dw(
    x, dy, x_ptr, dy_ptr, offsets_ptr, dw_ptr, num_rows, D, F, x_stride, dy_stride,
    TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dw[expert] = x^T dy over the rows of the expert: whole steps, then the rest by a mask, as the next rows are another's."""
    expert = tl.program_id(1)
    num_columns = tl.cdiv(F, BLOCK_N)
    d, f = tl.program_id(0) // num_columns * BLOCK_M, tl.program_id(0) % num_columns * BLOCK_N
    begin = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0).to(tl.int32)
    begin = tl.minimum(tl.maximum(begin, 0), num_rows)
    end = tl.minimum(tl.load(offsets_ptr + expert).to(tl.int32), num_rows)
    whole = begin + tl.maximum(end - begin, 0) // BLOCK_K * BLOCK_K
    ds, fs = d + tl.arange(0, BLOCK_M), f + tl.arange(0, BLOCK_N)
    dw = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for row in tl.range(begin, whole, BLOCK_K):
        x_KM = _load(x, row, d, num_rows, D, x_stride, BLOCK_K, BLOCK_M, TMA)
        dy_KN = _load(dy, row, f, num_rows, F, dy_stride, BLOCK_K, BLOCK_N, TMA)
        dw = tl.dot(x_KM.trans(), dy_KN, dw, input_precision="ieee")
    if whole < end:  # x is loaded as its transpose: one that comes from registers would have to be transposed there
        rows = whole + tl.arange(0, BLOCK_K)[None, :]
        x_MK = tl.load(x_ptr + rows.to(tl.int64) * x_stride + ds[:, None], mask=(rows < end) & (ds < D)[:, None], other=0.0)
        dy_KN = _load(dy_ptr, whole, f, end, F, dy_stride, BLOCK_K, BLOCK_N, False)
        dw = tl.dot(x_MK, dy_KN, dw, input_precision="ieee")
    places = dw_ptr + (expert.to(tl.int64) * D + ds[:, None]) * F + fs[None, :]
    tl.store(places, dw.to(dw_ptr.dtype.element_ty), mask=(ds < D)[:, None] & (fs < F)[None, :])


@triton.jit
def zero_rest(y_ptr, offsets_ptr, num_rows, F, LAST: tl.constexpr, BLOCK: tl.constexpr):
    """Zeros in the rows after all groups; where there are none, nothing is written."""
    first = tl.maximum(tl.load(offsets_ptr + LAST).to(tl.int64), 0) * F
    for place in tl.range(first + tl.program_id(0) * BLOCK, tl.cast(num_rows, tl.int64) * F, tl.num_programs(0) * BLOCK):
        places = place + tl.arange(0, BLOCK)
        zeros = tl.zeros([BLOCK], y_ptr.dtype.element_ty)
        tl.store(y_ptr + places, zeros, mask=places < tl.cast(num_rows, tl.int64) * F)


def grouped_matmul(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """The rows of each group times the weights of its expert; see `mpar.ops.grouped_matmul`."""
    _refuse("grouped_matmul", grouped_matmul_supports(arch_of(x), x, w, offsets))
    num_rows, (num_experts, size, width) = x.shape[0], w.shape
    y = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    if not size:
        return y.zero_()
    x, offsets, transposed = loadable(x), offsets.contiguous(), w.stride(2) != 1 and w.stride(1) == 1
    w = loadable(w.transpose(1, 2) if transposed else w)
    entry = tuned("grouped_matmul", x, _class(x))
    m, n, k = (entry.blocks[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    num_tiles = (num_rows + (num_experts + 1) * (m - 1)) // m
    tiles = torch.empty((3, num_tiles), dtype=torch.int32, device=x.device)
    listing = tuned("grouped_matmul_tiles", x)
    launch(
        _list_tiles,
        (triton.cdiv(num_tiles, listing.blocks["TILES"]),),
        *(offsets, tiles, num_rows, num_tiles),
        on=x,
        tuning=listing,
        NUM_EXPERTS=num_experts,
        BLOCK_E=triton.next_power_of_2(num_experts + 1),
        BLOCK_M=m,
    )
    grid = (min(num_tiles * triton.cdiv(width, n), _num_programs(x)),)
    tma = arch_of(x) != "sm_80"
    loaded = (describe(x, (m, k)), describe(w, (1, n, k) if transposed else (1, k, n))) if tma else (x, w)
    operands = (*loaded, y, tiles, num_tiles, num_rows, size, width, x.stride(0), *w.stride()[:2])
    launch(_grouped_matmul, grid, *operands, on=x, tuning=entry, TRANSPOSED=transposed, TMA=tma)
    return y


def grouped_matmul_dw(x: Tensor, dy: Tensor, offsets: Tensor) -> Tensor:
    """The gradient of the weights: one product for each expert, and zeros for an expert without rows."""
    _refuse("grouped_matmul_dw", grouped_matmul_supports(arch_of(x), x, dy, offsets))
    num_experts, num_rows, size, width = offsets.shape[0], *x.shape, dy.shape[1]
    dw = torch.empty((num_experts, size, width), dtype=x.dtype, device=x.device)
    if not dw.numel():
        return dw
    if not num_rows:
        return dw.zero_()
    x, dy, offsets = loadable(x), loadable(dy), offsets.contiguous()
    entry = tuned("grouped_matmul_dw", x, _class(x))
    m, n, k = (entry.blocks[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    tma = arch_of(x) != "sm_80"
    loaded = (describe(x, (k, m)), describe(dy, (k, n))) if tma else (x, dy)
    operands = (*loaded, x, dy, offsets, dw, num_rows, size, width, x.stride(0), dy.stride(0))
    grid = (triton.cdiv(size, m) * triton.cdiv(width, n), num_experts)
    launch(_grouped_matmul_dw, grid, *operands, on=x, tuning=entry, TMA=tma)
    return dw


def grouped_matmul_by_torch(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """`grouped_matmul` by torch's own grouped product, which does not write rows after all groups: they are zeroed here."""
    _refuse("grouped_matmul", grouped_mm_supports(arch_of(x), x, w, offsets))
    if not x.shape[0]:
        return torch.empty((0, w.shape[2]), dtype=x.dtype, device=x.device)
    w = w if 1 in (w.stride(1), w.stride(2)) else w.contiguous()
    y = torch_grouped_mm(loadable(x), w, offsets.to(torch.int32))
    entry = tuned("grouped_matmul_rest", x)
    operands = (y, offsets, x.shape[0], w.shape[2])
    launch(zero_rest, (_num_programs(x),), *operands, on=x, tuning=entry, LAST=offsets.shape[0] - 1)
    return y


def grouped_matmul_dw_by_torch(x: Tensor, dy: Tensor, offsets: Tensor) -> Tensor:
    """`grouped_matmul_dw` by torch's own grouped product, which also leaves out rows after all groups."""
    _refuse("grouped_matmul_dw", grouped_mm_supports(arch_of(x), x, dy, offsets))
    if not x.shape[0]:
        return torch.zeros((offsets.shape[0], x.shape[1], dy.shape[1]), dtype=x.dtype, device=x.device)
    return torch_grouped_mm(loadable(x).T, loadable(dy), offsets.to(torch.int32)).contiguous()


def _class(x: Tensor) -> str:
    return "float32" if x.dtype == torch.float32 else "half"


def _num_programs(x: Tensor) -> int:
    if x.device.type != "cuda":
        return INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(x.device).multi_processor_count


def _refuse(primitive: str, reason: str | None) -> None:
    if reason is not None:
        raise KernelError(f"{primitive}: {reason}")
