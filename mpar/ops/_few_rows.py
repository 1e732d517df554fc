"""Few rows: the product of a few rows with a matrix of bfloat16 on a CPU, which mpar's C++ reads once (mpar/cpp/products.cpp)."""

import ctypes
import functools

import torch
from torch import Tensor
from torch.nn import Parameter

from mpar.cpp import cpp_function, cpp_structure

__all__ = ["few_rows", "few_rows_are_faster"]

_MOST_ROWS, _UNIT = 8, 32
"""More rows are faster in tiles of the CPU or of oneDNN; a load takes 32 numbers."""
_PLAIN = (Tensor, Parameter)
_Call = cpp_structure("_Call", ["rows", "inner", "columns", "x_row", "w_column", "y_row"], [])


def few_rows_are_faster(dtype: torch.dtype) -> bool:
    """Whether there is a kernel for matrices of this dtype, the columns of which must lie one after the other."""
    return dtype == torch.bfloat16 and cpp_function("products", "few_rows_bfloat16", 4) is not None


def few_rows(a: Tensor, b: Tensor) -> Tensor | None:
    """The product of `a` (R, I) and `b` (I, C); None if it is none for the kernel."""
    (rows, inner), columns = a.shape, b.shape[1]
    fits = a.dtype == b.dtype == torch.bfloat16 and rows <= _MOST_ROWS and inner % _UNIT == 0 and inner == b.shape[0]
    if not fits or a.device.type != "cpu" or b.device.type != "cpu":
        return None
    if a.stride(1) != 1 or b.stride(0) != 1 or b.stride(1) < inner or not a.numel() or not columns:
        return None
    if not few_rows_are_faster(a.dtype):
        return None
    if type(a) in _PLAIN and type(b) in _PLAIN:
        return _by_kernel(a, b)
    return torch.ops.mpar_rows.few_rows(a, b)  # in a trace, where it stays one op


def _by_kernel(a: Tensor, b: Tensor) -> Tensor:
    """The same for operands that fit."""
    run = cpp_function("products", "few_rows_bfloat16", 4)
    assert run is not None
    (rows, inner), columns = a.shape, b.shape[1]
    y = a.new_empty(rows, columns)
    call = _call(rows, inner, columns, a.stride(0), b.stride(1), columns)
    run(ctypes.addressof(call), a.data_ptr(), b.data_ptr(), y.data_ptr())
    return y


@functools.lru_cache(maxsize=1024)
def _call(*sizes: int) -> ctypes.Structure:
    return _Call(*sizes)


_OPS = torch.library.Library("mpar_rows", "DEF")
_OPS.define("few_rows(Tensor a, Tensor b) -> Tensor")
_OPS.impl("few_rows", _by_kernel, "CPU")
torch.library.register_fake("mpar_rows::few_rows", torch.mm, lib=_OPS)
