"""FP8 quantisation. Where scales are those of blocks, a tile is held in registers, so that each element is read once, also if the
transpose is quantised with it. Scales of whole rows, columns and tensors are found first, for which the elements are read once
more. Maxima do not depend on the order in which they are taken.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpar.errors import KernelError
from mpar.kernels._fp8_support import quantise_supports
from mpar.kernels._launch import arch_of, launch, tuned
from mpar.ops import FP8_MAX, FP8_SIDE, FP8_SMALLEST_SCALE, fp8_scale_shape

__all__ = ["dequantise_fp8", "quantise_fp8", "quantise_fp8_both"]

LIMITS = {"FP8_MAX": FP8_MAX, "SMALLEST_SCALE": FP8_SMALLEST_SCALE}


@triton.jit
def _magnitude(x):
    """|x|, and infinity for what is not finite: maxima leave NaN out."""
    size = tl.abs(x)
    return tl.where(size < float("inf"), size, float("inf"))


@triton.jit
def _scale(amax, FP8_MAX: tl.constexpr, SMALLEST_SCALE: tl.constexpr):
    scale = tl.maximum(tl.div_rn(amax, tl.zeros_like(amax) + FP8_MAX), SMALLEST_SCALE)
    scale = tl.where(amax == 0.0, 1.0, scale)
    return tl.where(amax < float("inf"), scale, float("nan"))


@triton.jit
def _reciprocal(scale):
    return tl.div_rn(tl.zeros_like(scale) + 1.0, scale)


@triton.jit
def _to_fp8(x, FP8_MAX: tl.constexpr):
    """Limits, and keeps NaN, which minimum and maximum would not."""
    x = tl.where(x > FP8_MAX, FP8_MAX, tl.where(x < -FP8_MAX, -FP8_MAX, x))
    return x.to(tl.float8e4nv)


@triton.jit
def _quantise_tiles(
    x_ptr, q_ptr, scale_ptr, qt_ptr, scale_t_ptr, R, C, stride,
    SQUARE: tl.constexpr, FP8_MAX: tl.constexpr, SMALLEST_SCALE: tl.constexpr, SIDE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """One program per ROWS x 128 elements: a scale per row, or one for all where SQUARE; with `qt_ptr` the transpose as well."""
    i, j = tl.program_id(0), tl.program_id(1)
    num_i, num_j = tl.num_programs(0), tl.num_programs(1)
    rows, columns = i.to(tl.int64) * ROWS + tl.arange(0, ROWS), j.to(tl.int64) * SIDE + tl.arange(0, SIDE)
    inside = (rows < R)[:, None] & (columns < C)[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    size = _magnitude(x)
    per_row = tl.max(size, 1)
    if SQUARE:
        of_square = _scale(tl.max(per_row, 0), FP8_MAX, SMALLEST_SCALE)
        scale = of_square + tl.zeros([ROWS], tl.float32)
        tl.store(scale_ptr + i * num_j + j, of_square)
    else:
        scale = _scale(per_row, FP8_MAX, SMALLEST_SCALE)
        tl.store(scale_ptr + rows * num_j + j, scale, mask=rows < R)
    q = _to_fp8(x * _reciprocal(scale)[:, None], FP8_MAX)
    tl.store(q_ptr + rows[:, None] * C + columns[None, :], q, mask=inside)
    if qt_ptr is not None:
        if SQUARE:
            tl.store(scale_t_ptr + j * num_i + i, of_square)
        else:
            scale_t = _scale(tl.max(size, 0), FP8_MAX, SMALLEST_SCALE)
            tl.store(scale_t_ptr + columns * num_i + i, scale_t, mask=columns < C)
            q = _to_fp8(x * _reciprocal(scale_t)[None, :], FP8_MAX)
        tl.store(qt_ptr + columns[:, None] * R + rows[None, :], q.trans(), mask=(columns < C)[:, None] & (rows < R)[None, :])


@triton.jit
def _maxima(x_ptr, rows_ptr, columns_ptr, R, C, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Largest magnitudes of a tile: rows_ptr[column tile, row] of each row, columns_ptr[row tile, column] of each column."""
    i, j = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    rows, columns = i * ROWS + tl.arange(0, ROWS), j * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < R)[:, None] & (columns < C)[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    size = _magnitude(x)
    tl.store(rows_ptr + j * R + rows, tl.max(size, 1), mask=rows < R)
    if columns_ptr is not None:
        tl.store(columns_ptr + i * C + columns, tl.max(size, 0), mask=columns < C)


@triton.jit
def _scales(
    maxima_ptr,
    scale_ptr,
    num_parts,
    num_scales,
    FP8_MAX: tl.constexpr,
    SMALLEST_SCALE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """scale[n] from the largest of maxima[part, n] over all parts."""
    scales = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    amax = tl.zeros([PARTS, BLOCK], tl.float32)
    for first in range(0, num_parts, PARTS):
        parts = first + tl.arange(0, PARTS)[:, None]
        places = maxima_ptr + parts.to(tl.int64) * num_scales + scales[None, :]
        amax = tl.maximum(amax, tl.load(places, mask=(parts < num_parts) & (scales < num_scales)[None, :], other=0.0))
    tl.store(scale_ptr + scales, _scale(tl.max(amax, 0), FP8_MAX, SMALLEST_SCALE), mask=scales < num_scales)


@triton.jit
def _apply_scales(
    x_ptr, q_ptr, scale_ptr, qt_ptr, scale_t_ptr, R, C, stride, scale_stride,
    FP8_MAX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile by scales that are known: of its rows, or one (stride 0); with `qt_ptr` the transpose by those of its columns."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < R)[:, None] & (columns < C)[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + rows * scale_stride, mask=rows < R, other=1.0)
    q = _to_fp8(x * _reciprocal(scale)[:, None], FP8_MAX)
    tl.store(q_ptr + rows[:, None] * C + columns[None, :], q, mask=inside)
    if qt_ptr is not None:
        scale_t = tl.load(scale_t_ptr + columns * scale_stride, mask=columns < C, other=1.0)
        q = _to_fp8(x * _reciprocal(scale_t)[None, :], FP8_MAX)
        tl.store(qt_ptr + columns[:, None] * R + rows[None, :], q.trans(), mask=(columns < C)[:, None] & (rows < R)[None, :])


@triton.jit
def _dequantise(
    q_ptr,
    scale_ptr,
    x_ptr,
    R,
    C,
    row_stride,
    column_stride,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """x = q * scale; blocks are HEIGHT x WIDTH, or as large as the matrix where a stride is 0."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (rows < R) & (columns < C)
    q = tl.load(q_ptr + rows * C + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + rows // HEIGHT * row_stride + columns // WIDTH * column_stride, mask=inside, other=0.0)
    tl.store(x_ptr + rows * C + columns, (q * scale).to(x_ptr.dtype.element_ty), mask=inside)


def quantise_fp8(x: Tensor, *, block: str) -> tuple[Tensor, Tensor]:
    """`x` in e4m3, and its scales; see `mpar.ops.quantise_fp8`."""
    _refuse("quantise_fp8", quantise_supports(arch_of(x), x, block=block))
    q, scale, _, _ = _quantise(x, block, False)
    return q, scale


def quantise_fp8_both(x: Tensor, *, block: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantise_fp8` of `x`, and of its transpose."""
    _refuse("quantise_fp8_both", quantise_supports(arch_of(x), x, block=block))
    q, scale, qt, scale_t = _quantise(x, block, True)
    assert qt is not None and scale_t is not None
    return q, scale, qt, scale_t


def _quantise(x: Tensor, block: str, both: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    x = x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
    (R, C), fp8 = x.shape, torch.float8_e4m3fn
    q, scale = torch.empty((R, C), dtype=fp8, device=x.device), _empty(x, *fp8_scale_shape((R, C), block))
    qt = torch.empty((C, R), dtype=fp8, device=x.device) if both else None
    scale_t = _empty(x, *fp8_scale_shape((C, R), block)) if both else None
    if not x.numel():
        return q, scale.fill_(1.0), qt, None if scale_t is None else scale_t.fill_(1.0)
    if block in ("row", "tensor"):
        _by_rows(x, q, scale, qt, scale_t, block)
        return q, scale, qt, scale_t
    square = block == "128x128"
    entry = tuned("quantise_fp8_tiles", x, "square" if square else "both" if both else "row")
    grid = (triton.cdiv(R, entry.blocks["ROWS"]), triton.cdiv(C, FP8_SIDE))
    operands = (x, q, scale, qt, scale_t, R, C, x.stride(0))
    launch(_quantise_tiles, grid, *operands, on=x, tuning=entry, SQUARE=square, SIDE=FP8_SIDE, **LIMITS)
    return q, scale, qt, scale_t


def _by_rows(x: Tensor, q: Tensor, scale: Tensor, qt: Tensor | None, scale_t: Tensor | None, block: str) -> None:
    """Find the maxima of rows (and columns) of each tile, then scales from the maxima over tiles, then scale all elements."""
    (R, C), entry, last = x.shape, tuned("quantise_fp8_maxima", x), tuned("quantise_fp8_scales", x)
    grid = (triton.cdiv(R, entry.blocks["ROWS"]), triton.cdiv(C, entry.blocks["COLUMNS"]))
    of_rows = _empty(x, grid[1], R)
    of_columns = _empty(x, grid[0], C) if qt is not None and block == "row" else None
    launch(_maxima, grid, x, of_rows, of_columns, R, C, x.stride(0), on=x, tuning=entry)
    per_row = block == "row"
    for maxima, result in ((of_rows, scale), (of_columns, scale_t)):
        if maxima is not None and result is not None:
            maxima = maxima if per_row else maxima.amax().view(1, 1)
            size = (triton.cdiv(maxima.shape[1], last.blocks["BLOCK"]),)
            launch(_scales, size, maxima, result, *maxima.shape, on=x, tuning=last, **LIMITS)
    if scale_t is not None and not per_row:
        scale_t.copy_(scale)
    entry = tuned("quantise_fp8_apply", x)
    grid = (triton.cdiv(R, entry.blocks["ROWS"]), triton.cdiv(C, entry.blocks["COLUMNS"]))
    operands = (x, q, scale, qt, scale_t, R, C, x.stride(0), int(per_row))
    launch(_apply_scales, grid, *operands, on=x, tuning=entry, FP8_MAX=FP8_MAX)


def dequantise_fp8(q: Tensor, scale: Tensor, *, block: str, dtype: torch.dtype) -> Tensor:
    """The numbers that `q` and `scale` stand for; see `mpar.ops.dequantise_fp8`."""
    _refuse("dequantise_fp8", quantise_supports(arch_of(q), q, block=block, dtype=dtype))
    q, scale = q.contiguous(), scale.contiguous()
    x = torch.empty(q.shape, dtype=dtype, device=q.device)
    entry = tuned("dequantise_fp8", q)
    if x.numel():
        R, C = x.shape
        grid = (triton.cdiv(R, entry.blocks["ROWS"]), triton.cdiv(C, entry.blocks["COLUMNS"]))
        strides = (0 if block == "tensor" else scale.shape[1], int(block in ("1x128", "128x128")))
        blocks = {"HEIGHT": FP8_SIDE if block == "128x128" else 1, "WIDTH": FP8_SIDE}
        launch(_dequantise, grid, q, scale, x, R, C, *strides, on=q, tuning=entry, **blocks)
    return x


def _empty(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def _refuse(primitive: str, reason: str | None) -> None:
    if reason is not None:
        raise KernelError(f"{primitive}: {reason}")
