"""Layer norm, also of a sum. A row is held in registers and read once; only the backward of very wide rows reads them twice.

Bandwidth-bound: for each element the forward moves 2 elements to or from memory (4 with a sum), the backward 3 (4 with a sum).
The gradients of weight and bias are summed as in `_rms_norm.py`: by a fixed number of Triton programs, then by a second kernel.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpar.kernels._launch import arch_of, launch, tuned
from mpar.kernels._rows import add_rows, as_rows, width_class
from mpar.kernels._table import classes

__all__ = ["add_layer_norm", "add_layer_norm_bwd", "layer_norm", "layer_norm_bwd"]


@triton.jit
def _standardise(x, inside, D, eps):
    """`x` shifted and scaled to mean 0 and variance 1 in every row, and 1 / standard deviation. Outside it is 0."""
    x = tl.where(inside, x - (tl.sum(x, 1) / D)[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    return x * rstd, rstd


@triton.jit
def _layer_norm_fwd(
    x_ptr,
    residual_ptr,  # or None
    weight_ptr,  # or None
    bias_ptr,  # or None
    y_ptr,
    total_ptr,  # or None, with residual_ptr
    M,
    D,
    x_stride,
    residual_stride,
    eps,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # int32 rows * D overflow at 2**31 elements
    columns = tl.arange(0, BLOCK_D)[None, :]
    inside = (rows < M) & (columns < D)
    x = tl.load(x_ptr + rows * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + rows * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + rows * D + columns, total, mask=inside)
        x = total.to(tl.float32)
    y, _ = _standardise(x, inside, D, eps)
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
    tl.store(y_ptr + rows * D + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _layer_norm_bwd(
    x_ptr,
    weight_ptr,  # or None
    dy_ptr,
    dtotal_ptr,  # or None: added to the gradient
    dx_ptr,
    dweight_ptr,  # (programs, D), or None
    dbias_ptr,  # (programs, D), or None
    M,
    D,
    x_stride,
    dy_stride,
    dtotal_stride,
    eps,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    columns = tl.arange(0, BLOCK_D)[None, :]
    first = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    dweight = tl.zeros([ROWS, BLOCK_D], dtype=tl.float32)
    dbias = tl.zeros([ROWS, BLOCK_D], dtype=tl.float32)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
    for step in range(0, M, PROGRAMS * ROWS):
        rows = first + step
        inside = (rows < M) & (columns < D)
        x = tl.load(x_ptr + rows * x_stride + columns, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        dy = tl.load(dy_ptr + rows * dy_stride + columns, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if weight_ptr is not None:
            if ROWS == 1:
                weight = tl.load(weight_ptr + columns, mask=columns < D, other=0.0, eviction_policy="evict_last").to(tl.float32)
            dy *= weight
        mean = (tl.sum(x, 1) / D)[:, None]
        x = tl.where(inside, x - mean, 0.0)
        rstd = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        slope = rstd * (tl.sum(dy * x, 1) / D)[:, None]
        shift = (tl.sum(dy, 1) / D)[:, None]
        # read again, from the cache: twice as many programs have room in the registers, which hides more of the first reads
        x = tl.load(x_ptr + rows * x_stride + columns, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        dy = tl.load(dy_ptr + rows * dy_stride + columns, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        x = (x - mean) * rstd
        if dweight_ptr is not None:
            dweight += dy * x
        if dbias_ptr is not None:
            dbias += dy
        if weight_ptr is not None:
            if ROWS == 1:
                weight = tl.load(weight_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
            dy *= weight
        dx = (rstd * (dy - x * slope - shift)).to(dx_ptr.dtype.element_ty)
        if dtotal_ptr is not None:
            dtotal = tl.load(dtotal_ptr + rows * dtotal_stride + columns, mask=inside, other=0.0).to(tl.float32)
            dx = (dx.to(tl.float32) + dtotal).to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + rows * D + columns, dx, mask=inside)
    part = tl.program_id(0).to(tl.int64) * D + columns
    if dweight_ptr is not None:
        tl.store(dweight_ptr + part, tl.sum(dweight, 0)[None, :], mask=columns < D)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + part, tl.sum(dbias, 0)[None, :], mask=columns < D)


@triton.jit
def _layer_norm_bwd_wide(
    x_ptr,
    weight_ptr,  # or None
    dy_ptr,
    dtotal_ptr,  # or None: added to the gradient
    dx_ptr,
    dweight_ptr,  # (programs, D), or None
    dbias_ptr,  # (programs, D), or None
    M,
    D,
    x_stride,
    dy_stride,
    dtotal_stride,
    eps,
    BLOCK_D: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Rows too wide for registers: block by block, three times; parts of the gradients stay in memory, where they begin as 0."""
    offsets = tl.arange(0, BLOCK_D)
    part = tl.program_id(0).to(tl.int64) * D + offsets
    for step in range(0, M - tl.program_id(0), PROGRAMS):
        row = tl.program_id(0).to(tl.int64) + step
        sums = tl.zeros([BLOCK_D], dtype=tl.float32)
        for start in range(0, D, BLOCK_D):
            columns = start + offsets
            inside = columns < D
            sums += tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        mean = tl.sum(sums, 0) / D
        squares = tl.zeros([BLOCK_D], dtype=tl.float32)
        products = tl.zeros([BLOCK_D], dtype=tl.float32)
        shifts = tl.zeros([BLOCK_D], dtype=tl.float32)
        for start in range(0, D, BLOCK_D):
            columns = start + offsets
            inside = columns < D
            x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
            dy = tl.load(dy_ptr + row * dy_stride + columns, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
            if weight_ptr is not None:
                dy *= tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
            x = tl.where(inside, x - mean, 0.0)
            squares += x * x
            products += x * dy
            shifts += dy
        rstd = tl.rsqrt(tl.sum(squares, 0) / D + eps)
        slope = rstd * (tl.sum(products, 0) / D)
        shift = tl.sum(shifts, 0) / D
        for start in range(0, D, BLOCK_D):
            columns = start + offsets
            inside = columns < D
            x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
            dy = tl.load(dy_ptr + row * dy_stride + columns, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
            x = (x - mean) * rstd
            if dweight_ptr is not None:
                before = tl.load(dweight_ptr + part + start, mask=inside, other=0.0)
                tl.store(dweight_ptr + part + start, before + dy * x, mask=inside)
            if dbias_ptr is not None:
                before = tl.load(dbias_ptr + part + start, mask=inside, other=0.0)
                tl.store(dbias_ptr + part + start, before + dy, mask=inside)
            if weight_ptr is not None:
                dy *= tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
            dx = (rstd * (dy - x * slope - shift)).to(dx_ptr.dtype.element_ty)
            if dtotal_ptr is not None:
                dtotal = tl.load(dtotal_ptr + row * dtotal_stride + columns, mask=inside, other=0.0).to(tl.float32)
                dx = (dx.to(tl.float32) + dtotal).to(dx_ptr.dtype.element_ty)
            tl.store(dx_ptr + row * D + columns, dx, mask=inside)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float) -> Tensor:
    """See `mpar.ops.layer_norm`."""
    return _forward("layer_norm", x, None, weight, bias, eps)[0]


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor]:
    """`(layer_norm(x + residual), x + residual)`; see `mpar.ops.add_layer_norm`."""
    return _forward("add_layer_norm", x, residual, weight, bias, eps)


def layer_norm_bwd(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, dy: Tensor, *, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `x`, `weight` and `bias`."""
    return _backward("layer_norm_bwd", x, weight, bias, dy, None, eps)


def add_layer_norm_bwd(
    total: Tensor, weight: Tensor | None, bias: Tensor | None, dy: Tensor, dtotal: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient that both operands of the sum have, and those of `weight` and `bias`."""
    return _backward("add_layer_norm_bwd", total, weight, bias, dy, dtotal, eps)


def _forward(
    name: str, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    size, y = x.shape[-1], torch.empty(x.shape, dtype=x.dtype, device=x.device)
    entry = tuned("layer_norm_fwd", x, width_class(name, size))
    total = x if residual is None else torch.empty_like(y)
    if not y.numel():
        return y, total
    x, other = as_rows(x), None if residual is None else as_rows(residual)
    weight, bias = _contiguous(weight), _contiguous(bias)
    operands = (x, other, weight, bias, y, None if other is None else total)
    sizes = (*x.shape, x.stride(0), 0 if other is None else other.stride(0))
    launch(_layer_norm_fwd, (triton.cdiv(x.shape[0], entry.blocks["ROWS"]),), *operands, *sizes, eps, on=y, tuning=entry)
    return y, total


def _backward(
    name: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, dy: Tensor, dtotal: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    size, dx = x.shape[-1], torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kind, empty = width_class(name, size), x.new_empty(0)
    wide = kind not in classes("layer_norm_bwd", arch_of(x))
    entry = tuned("layer_norm_bwd_wide", x) if wide else tuned("layer_norm_bwd", x, kind)
    if not dx.numel():
        dweight, dbias = (empty if p is None else torch.zeros(size, dtype=p.dtype, device=x.device) for p in (weight, bias))
        return dx, dweight, dbias
    x, dy = as_rows(x), as_rows(dy)
    num_programs = min(entry.blocks["PROGRAMS"], triton.cdiv(x.shape[0], entry.blocks.get("ROWS", 1)))
    make = torch.zeros if wide else torch.empty
    parts = [None if p is None else make(num_programs, size, dtype=torch.float32, device=x.device) for p in (weight, bias)]
    other = None if dtotal is None else as_rows(dtotal)
    operands = (x, _contiguous(weight), dy, other, dx, *parts)
    sizes = (*x.shape, x.stride(0), dy.stride(0), 0 if other is None else other.stride(0))
    kernel = _layer_norm_bwd_wide if wide else _layer_norm_bwd
    launch(kernel, (num_programs,), *operands, *sizes, eps, on=dx, tuning=entry)
    dweight, dbias = (
        empty if p is None or part is None else add_rows(part, p.dtype) for p, part in zip((weight, bias), parts, strict=True)
    )
    return dx, dweight, dbias


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
