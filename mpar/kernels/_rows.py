"""Rows: operands as matrices of rows, whatever their leading dims; and the sum over rows of partial sums, one of each program."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpar.errors import KernelError
from mpar.kernels._launch import launch, tuned

__all__ = ["add_rows", "as_rows", "width_class"]

MAX_WIDTH = 32768
"""The widest row that one program holds in registers."""


@triton.jit
def _add_rows(partial_ptr, total_ptr, num_rows, D, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """total[d] = sum over rows of partial[row, d], rows in the same order always."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(0, num_rows, ROWS):
        rows = first + tl.arange(0, ROWS)[:, None]
        total += tl.load(partial_ptr + rows.to(tl.int64) * D + columns, mask=(rows < num_rows) & (columns < D), other=0.0)
    sums = tl.sum(total, 0)[None, :]
    tl.store(total_ptr + columns, sums.to(total_ptr.dtype.element_ty), mask=columns < D)


def as_rows(x: Tensor) -> Tensor:
    """`x` (..., D) as (M, D) with adjacent columns and any stride of rows; a copy only where there is no such view."""
    size = x.shape[-1]
    if size > 1 and x.stride(-1) != 1:
        x = x.contiguous()
    return x.reshape(-1, size)


def width_class(primitive: str, size: int) -> str:
    """The table's class of rows of `size` columns: the next power of two, at least 64. Raises KernelError over 32768."""
    if size > MAX_WIDTH:
        raise KernelError(f"{primitive}: rows of {size}: kernels hold rows of at most {MAX_WIDTH} in registers; use mpar.ops")
    return str(max(64, triton.next_power_of_2(size)))


def add_rows(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over dim 0 of a contiguous float32 matrix, rounded to `dtype`; equal matrices give equal bits."""
    num_rows, size = partial.shape
    total = torch.empty(size, dtype=dtype, device=partial.device)
    entry = tuned("add_rows", partial)
    if size:
        launch(_add_rows, (triton.cdiv(size, entry.blocks["COLUMNS"]),), partial, total, num_rows, size, on=total, tuning=entry)
    return total
