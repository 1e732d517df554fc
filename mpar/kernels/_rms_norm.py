"""RMS norm, also of a sum. A row is held in registers and read once; only the backward of very wide rows reads them twice.

Bandwidth-bound: for each element the forward moves 2 elements to or from memory (4 with a sum), the backward 3 (4 with a sum). In
the backward a fixed number of Triton programs share the rows. Each adds up the weight's gradient over its own rows, and a second
kernel adds up these partial sums. There are no atomics, so equal operands give equal bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpar.kernels._launch import arch_of, launch, tuned
from mpar.kernels._rows import add_rows, as_rows, width_class
from mpar.kernels._table import classes

__all__ = ["add_rms_norm", "add_rms_norm_bwd", "rms_norm", "rms_norm_bwd"]


@triton.jit
def _rms_norm_fwd(
    x_ptr,
    residual_ptr,  # or None
    weight_ptr,  # or None
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
    y = x * tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
        y = y.to(y_ptr.dtype.element_ty).to(tl.float32) * weight  # rounded before the weight, as the op says
    tl.store(y_ptr + rows * D + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm_bwd(
    x_ptr,
    weight_ptr,  # or None
    dy_ptr,
    dtotal_ptr,  # or None: added to the gradient
    dx_ptr,
    dweight_ptr,  # (programs, D), or None with weight_ptr
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
        rstd = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        slope = rstd * rstd * (tl.sum(x * dy, 1) / D)[:, None]
        # read again, from the cache: twice as many programs have room in the registers, which hides more of the first reads
        x = tl.load(x_ptr + rows * x_stride + columns, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        dy = tl.load(dy_ptr + rows * dy_stride + columns, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if weight_ptr is not None:
            dweight += dy * (x * rstd)
            if ROWS == 1:
                weight = tl.load(weight_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
            dy *= weight
        dx = (rstd * (dy - x * slope)).to(dx_ptr.dtype.element_ty)
        if dtotal_ptr is not None:
            dtotal = tl.load(dtotal_ptr + rows * dtotal_stride + columns, mask=inside, other=0.0).to(tl.float32)
            dx = (dx.to(tl.float32) + dtotal).to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + rows * D + columns, dx, mask=inside)
    if weight_ptr is not None:
        part = dweight_ptr + tl.program_id(0).to(tl.int64) * D + columns
        tl.store(part, tl.sum(dweight, 0)[None, :], mask=columns < D)


@triton.jit
def _rms_norm_bwd_wide(
    x_ptr,
    weight_ptr,  # or None
    dy_ptr,
    dtotal_ptr,  # or None: added to the gradient
    dx_ptr,
    dweight_ptr,  # (programs, D), or None with weight_ptr
    M,
    D,
    x_stride,
    dy_stride,
    dtotal_stride,
    eps,
    BLOCK_D: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Rows too wide for registers: block by block, twice; the part of the weight's gradient is in memory and begins as 0."""
    offsets = tl.arange(0, BLOCK_D)
    part = dweight_ptr if weight_ptr is None else dweight_ptr + tl.program_id(0).to(tl.int64) * D
    for step in range(0, M - tl.program_id(0), PROGRAMS):
        row = tl.program_id(0).to(tl.int64) + step
        squares = tl.zeros([BLOCK_D], dtype=tl.float32)
        products = tl.zeros([BLOCK_D], dtype=tl.float32)
        for start in range(0, D, BLOCK_D):
            columns = start + offsets
            inside = columns < D
            x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
            dy = tl.load(dy_ptr + row * dy_stride + columns, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
            if weight_ptr is not None:
                dy *= tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
            squares += x * x
            products += x * dy
        rstd = tl.rsqrt(tl.sum(squares, 0) / D + eps)
        slope = rstd * rstd * (tl.sum(products, 0) / D)
        for start in range(0, D, BLOCK_D):
            columns = start + offsets
            inside = columns < D
            x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
            dy = tl.load(dy_ptr + row * dy_stride + columns, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
            if weight_ptr is not None:
                tl.store(part + columns, tl.load(part + columns, mask=inside, other=0.0) + dy * (x * rstd), mask=inside)
                dy *= tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
            dx = (rstd * (dy - x * slope)).to(dx_ptr.dtype.element_ty)
            if dtotal_ptr is not None:
                dtotal = tl.load(dtotal_ptr + row * dtotal_stride + columns, mask=inside, other=0.0).to(tl.float32)
                dx = (dx.to(tl.float32) + dtotal).to(dx_ptr.dtype.element_ty)
            tl.store(dx_ptr + row * D + columns, dx, mask=inside)


def rms_norm(x: Tensor, weight: Tensor | None, *, eps: float) -> Tensor:
    """See `mpar.ops.rms_norm`."""
    return _forward("rms_norm", x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, *, eps: float) -> tuple[Tensor, Tensor]:
    """`(rms_norm(x + residual), x + residual)`; see `mpar.ops.add_rms_norm`."""
    return _forward("add_rms_norm", x, residual, weight, eps)


def rms_norm_bwd(x: Tensor, weight: Tensor | None, dy: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of `x` and `weight`."""
    return _backward("rms_norm_bwd", x, weight, dy, None, eps)


def add_rms_norm_bwd(
    total: Tensor, weight: Tensor | None, dy: Tensor, dtotal: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor]:
    """The gradient that both operands of the sum have, and that of `weight`."""
    return _backward("add_rms_norm_bwd", total, weight, dy, dtotal, eps)


def _forward(name: str, x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    size, y = x.shape[-1], torch.empty(x.shape, dtype=x.dtype, device=x.device)
    entry = tuned("rms_norm_fwd", x, width_class(name, size))
    total = x if residual is None else torch.empty_like(y)
    if not y.numel():
        return y, total
    x, other = as_rows(x), None if residual is None else as_rows(residual)
    weight = None if weight is None else weight.contiguous()
    operands = (x, other, weight, y, None if other is None else total)
    sizes = (*x.shape, x.stride(0), 0 if other is None else other.stride(0))
    launch(_rms_norm_fwd, (triton.cdiv(x.shape[0], entry.blocks["ROWS"]),), *operands, *sizes, eps, on=y, tuning=entry)
    return y, total


def _backward(
    name: str, x: Tensor, weight: Tensor | None, dy: Tensor, dtotal: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    size, dx = x.shape[-1], torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kind = width_class(name, size)
    wide = kind not in classes("rms_norm_bwd", arch_of(x))
    entry = tuned("rms_norm_bwd_wide", x) if wide else tuned("rms_norm_bwd", x, kind)
    if not dx.numel():
        return dx, x.new_empty(0) if weight is None else torch.zeros(weight.shape, dtype=weight.dtype, device=x.device)
    x, dy = as_rows(x), as_rows(dy)
    num_programs = min(entry.blocks["PROGRAMS"], triton.cdiv(x.shape[0], entry.blocks.get("ROWS", 1)))
    partial, other = None, None if dtotal is None else as_rows(dtotal)
    if weight is not None:
        make = torch.zeros if wide else torch.empty
        weight, partial = weight.contiguous(), make(num_programs, size, dtype=torch.float32, device=x.device)
    sizes = (*x.shape, x.stride(0), dy.stride(0), 0 if other is None else other.stride(0))
    kernel = _rms_norm_bwd_wide if wide else _rms_norm_bwd
    launch(kernel, (num_programs,), x, weight, dy, other, dx, partial, *sizes, eps, on=dx, tuning=entry)
    return dx, x.new_empty(0) if weight is None or partial is None else add_rows(partial, weight.dtype)
