"""Product: a product of two matrices on a CPU, by the fastest way that there is for their dtype, their sizes and how they lie."""

import torch
from torch import Tensor

from mpar.ops._few_rows import few_rows
from mpar.ops._matmul import matmul
from mpar.torch_private import onednn_has_bfloat16, onednn_is_faster, onednn_mm

__all__ = ["add_product", "product", "product_into"]

_FEWEST_ROWS = 64
"""With fewer rows oneDNN loses what it gains: it first copies the second matrix into its own order."""
_WIDENED = 2**22
"""Elements of a matrix of bfloat16 that are float32 at a time."""


def product(a: Tensor, b: Tensor) -> Tensor:
    """`torch.mm(a, b)`, whatever is fastest on this CPU.

    A few rows are multiplied by mpar's C++, if it has a kernel for how the matrix lies, and so is float32 where MKL is slower;
    bfloat16 in float32, if the CPU does not compute in it; float32 by oneDNN, if that is faster here. For gradients of weights,
    where the rows of `a` are no rows in memory, it is not, or not for all shapes: those stay with torch.mm.
    """
    found = few_rows(a, b)
    if found is None:
        found = matmul(a, b)
    if found is not None:
        return found
    if a.dtype == b.dtype == torch.bfloat16 and a.device.type == "cpu" and not onednn_has_bfloat16():
        return _in_float32(a, b)
    return onednn_mm(a, b) if _is_for_onednn(a, b) else torch.mm(a, b)


def add_product(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`x += product(a, b)`, without memory for the product where torch adds to `x` what it multiplies."""
    if a.device.type == "cpu" and (a.dtype not in (torch.float32, torch.float64) or _is_for_onednn(a, b)):
        return x.add_(product(a, b))
    found = few_rows(a, b)
    if found is not None:
        return x.add_(found)
    added = matmul(a, b, x, adds=True)
    return x.addmm_(a, b) if added is None else added


def product_into(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`torch.mm(a, b, out=out)`, by mpar's C++ where MKL is slower."""
    written = matmul(a, b, out)
    return torch.mm(a, b, out=out) if written is None else written


def _is_for_onednn(a: Tensor, b: Tensor) -> bool:
    if a.dtype != torch.float32 or a.device.type != "cpu" or a.shape[0] < _FEWEST_ROWS or not onednn_is_faster():
        return False
    return _has_rows(a) and (_has_rows(b) or _has_rows(b.t()))


def _in_float32(a: Tensor, b: Tensor) -> Tensor:
    """The product of float32, rounded once, which takes a fifth of the time of torch.mm on an AMD EPYC with AVX2 (512 rows).
    Columns of `b` are widened in turn, so that no large weight is there twice."""
    wide, count = a.float(), max(1, _WIDENED // max(1, b.shape[0]))
    if b.shape[1] <= count:
        return product(wide, b.float()).to(a.dtype)
    return torch.cat([product(wide, part.float()).to(a.dtype) for part in b.split(count, 1)], 1)


def _has_rows(x: Tensor) -> bool:
    """Whether the elements of a row are neighbours in memory, and rows do not overlap; oneDNN takes no other layouts."""
    return x.shape[1] > 1 and x.stride(1) == 1 and x.stride(0) >= x.shape[1]
