"""Matmul: the product of two matrices of float32 by mpar's C++ (mpar/cpp/matmul.cpp), on CPUs on which MKL is slower."""

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from mpar.cpp import cpp_function, cpp_structure
from mpar.torch_private import OpOverload, is_amd

__all__ = ["MATMUL_OPS", "matmul", "matmul_is_faster"]

_FEWEST_ROWS, _FEWEST_COLUMNS, _FEWEST_PRODUCTS = 128, 2, 2**15
"""With fewer rows or columns, most of the time copies of `b` are made or zeros are multiplied; with fewer products, time is lost
between Python and C++."""
_PLAIN = (Tensor, Parameter)
_Call = cpp_structure("_Call", ["rows", "inner", "columns", "a_row", "b_row", "b_step", "adds"], [])
"""`Call` of matmul.cpp."""


@functools.cache
def matmul_is_faster() -> bool:
    """Whether this CPU is one of AMD with AVX2, for which MKL has kernels that copy more, and there is a C++ compiler. With
    AVX-512 see `onednn_is_faster`."""
    is_slow_in_mkl = torch.backends.cpu.get_cpu_capability() == "AVX2" and is_amd()
    return is_slow_in_mkl and cpp_function("matmul", "matmul_float32", 4) is not None


def matmul(a: Tensor, b: Tensor, out: Tensor | None = None, *, adds: bool = False) -> Tensor | None:
    """The product of `a` (R, I) and `b` (I, C), written to or, with `adds`, added to `out`; None if it is none for this kernel.

    Gradients of weights, for which `a` would have to be copied, are none: MKL computes them as fast. Autograd is not told of what
    is written, and `out` must not overlap the operands.
    A number of the product has the same bits whichever rows and columns there are beside it.
    """
    if a.dtype != torch.float32 or a.device.type != "cpu" or b.device.type != "cpu" or not matmul_is_faster():
        return None
    if a.is_neg() or b.is_neg():  # the numbers in memory have the other sign
        return None
    plan = _plan(a.shape, a.stride(), b.shape, b.stride(), b.dtype, adds)
    if plan is None or (out is not None and not _takes(out, plan[2])):
        return None
    if type(a) in _PLAIN and type(b) in _PLAIN and (out is None or type(out) in _PLAIN):
        return _by_kernel(a, b, out, adds)
    product = torch.ops.mpar_matmul.matmul(a, b)  # in a trace, where it stays one op
    if out is None:
        return product
    return out.add_(product) if adds else out.copy_(product)


def _takes(out: Tensor, shape: tuple[int, int]) -> bool:
    fits = out.shape == shape and out.is_contiguous() and not out.is_neg()
    return fits and out.dtype == torch.float32 and out.device.type == "cpu"


def _by_kernel(a: Tensor, b: Tensor, out: Tensor | None = None, adds: bool = False) -> Tensor:
    """The same for operands that fit; by torch if code that was compiled calls it where there is no kernel."""
    plan = _plan(a.shape, a.stride(), b.shape, b.stride(), b.dtype, adds)
    if plan is None:
        return torch.mm(a, b)
    run, call, shape = plan
    y = torch.empty(shape, dtype=torch.float32, device="cpu") if out is None else out
    run(call, a, b, y)
    return y


@functools.lru_cache(maxsize=4096)
def _plan(
    shape_a: Sequence[int],
    stride_a: Sequence[int],
    shape_b: Sequence[int],
    stride_b: Sequence[int],
    dtype_b: torch.dtype,
    adds: bool,
) -> tuple[Callable[..., None], ctypes.Structure, tuple[int, int]] | None:
    """The kernel for such operands, the structure that it reads, and the shape of the product; None if there is no kernel."""
    (rows, inner), (summed, columns) = shape_a, shape_b
    fits = rows >= _FEWEST_ROWS and columns >= _FEWEST_COLUMNS and rows * inner * columns >= _FEWEST_PRODUCTS
    if not fits or stride_a[1] != 1 or inner != summed or dtype_b != torch.float32:
        return None
    run = cpp_function("matmul", "matmul_float32", 4)
    return None if run is None else (run, _Call(rows, inner, columns, stride_a[0], *stride_b, adds), (rows, columns))


_OPS = torch.library.Library("mpar_matmul", "DEF")
_OPS.define("matmul(Tensor a, Tensor b) -> Tensor")
_OPS.impl("matmul", _by_kernel, "CPU")
torch.library.register_fake("mpar_matmul::matmul", torch.mm, lib=_OPS)
MATMUL_OPS: Mapping[OpOverload, Callable[..., Tensor]] = {torch.ops.mpar_matmul.matmul.default: _by_kernel}
"""See `OPAQUE_OPS`."""
