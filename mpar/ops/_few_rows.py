"""Few rows: the product of a few rows with a matrix on a CPU, which mpar's C++ reads once (mpar/cpp/products.cpp).

A matrix is read fastest if it lies column by column: a thread then reads a few streams from memory. One of float32 is also read
row by row.
"""

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from mpar.cpp import cpp_function, cpp_structure
from mpar.ops._matmul import matmul_is_faster
from mpar.torch_private import OpOverload, onednn_has_bfloat16

__all__ = ["FEW_ROWS_OPS", "few_rows", "few_rows_read_columns"]

_UNIT = 32
"""The number of columns is a multiple of this, if the matrix is read row by row."""
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_PLAIN = (Tensor, Parameter)
_Call = cpp_structure("_Call", ["rows", "inner", "columns", "x_row", "w_step", "y_row"], [])


def few_rows_read_columns(dtype: torch.dtype) -> bool:
    """Whether a matrix of this dtype is multiplied much faster with few rows if its columns lie one after the other."""
    return dtype in _NAMES and cpp_function("products", f"by_columns_{_NAMES[dtype]}", 4) is not None


def few_rows(a: Tensor, b: Tensor) -> Tensor | None:
    """The product of `a` (R, I) and `b` (I, C); None if it is none for a kernel."""
    if a.device.type != "cpu" or b.device.type != "cpu" or a.is_neg() or b.is_neg():
        return None
    if _plan(a.shape, a.stride(), a.dtype, b.shape, b.stride(), b.dtype) is None:
        return None
    if type(a) in _PLAIN and type(b) in _PLAIN:
        return _by_kernel(a, b)
    return torch.ops.mpar_rows.few_rows(a, b)  # in a trace, where it stays one op


def _by_kernel(a: Tensor, b: Tensor) -> Tensor:
    """The same for operands that fit; by torch if code that was compiled calls it where there is no kernel."""
    plan = _plan(a.shape, a.stride(), a.dtype, b.shape, b.stride(), b.dtype)
    if plan is None:
        return torch.mm(a, b)
    run, call, shape = plan
    y = torch.empty(shape, dtype=a.dtype, device="cpu")
    run(call, a, b, y)
    return y


@functools.lru_cache(maxsize=1024)
def _plan(
    shape_a: Sequence[int],
    stride_a: Sequence[int],
    dtype_a: torch.dtype,
    shape_b: Sequence[int],
    stride_b: Sequence[int],
    dtype_b: torch.dtype,
) -> tuple[Callable[..., None], ctypes.Structure, tuple[int, int]] | None:
    """The kernel for such operands, the structure that it reads, and the shape of the product; None if there is no kernel."""
    (rows, inner), (summed, columns) = shape_a, shape_b
    if dtype_a != dtype_b or dtype_a not in _NAMES:
        return None
    steps, size, way = (stride_b, inner, "columns") if stride_b[0] == 1 else (stride_b[::-1], columns, "rows")
    fits = 0 < rows <= _most_rows(way, dtype_a) and inner == summed > 0 < columns
    fits &= way == "columns" or columns % _UNIT == 0
    if not fits or stride_a[1] != 1 or steps[0] != 1 or steps[1] < size:
        return None
    run = cpp_function("products", f"by_{way}_{_NAMES[dtype_a]}", 4)
    return None if run is None else (run, _Call(rows, inner, columns, stride_a[0], steps[1], columns), (rows, columns))


@functools.cache
def _most_rows(way: str, dtype: torch.dtype) -> int:
    """Beyond so many rows, products that copy the matrix by parts are faster: mpar's own, or those of oneDNN or MKL. On some CPUs
    MKL is slow, and bfloat16 would have to be widened."""
    if dtype == torch.bfloat16:
        return 0 if way == "rows" else 8 if onednn_has_bfloat16() else 127
    return 127 if way == "columns" and matmul_is_faster() else 16


_OPS = torch.library.Library("mpar_rows", "DEF")
_OPS.define("few_rows(Tensor a, Tensor b) -> Tensor")
_OPS.impl("few_rows", _by_kernel, "CPU")
torch.library.register_fake("mpar_rows::few_rows", torch.mm, lib=_OPS)
FEW_ROWS_OPS: Mapping[OpOverload, Callable[..., Tensor]] = {torch.ops.mpar_rows.few_rows.default: _by_kernel}
"""See `OPAQUE_OPS`."""
