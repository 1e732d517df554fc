"""Product: a product of two matrices on a CPU, by the faster of the libraries that torch has."""

import torch
from torch import Tensor

from mpar.ops._few_rows import few_rows
from mpar.torch_private import onednn_is_faster, onednn_mm

__all__ = ["product"]

_FEWEST_ROWS = 64
"""With fewer rows oneDNN loses what it gains: it first copies the second matrix into its own order."""


def product(a: Tensor, b: Tensor) -> Tensor:
    """`torch.mm(a, b)`: of a few rows by mpar's C++, if it has a kernel for how the matrix lies; of float32 by oneDNN, if that is
    faster on this machine. For gradients of weights, where the rows of `a` are no rows in memory, it is not, or not for all
    shapes: those stay with torch.mm.
    """
    found = few_rows(a, b)
    if found is not None:
        return found
    if a.dtype != torch.float32 or a.device.type != "cpu" or a.shape[0] < _FEWEST_ROWS or not onednn_is_faster():
        return torch.mm(a, b)
    return onednn_mm(a, b) if _has_rows(a) and (_has_rows(b) or _has_rows(b.t())) else torch.mm(a, b)


def _has_rows(x: Tensor) -> bool:
    """Whether the elements of a row are neighbours in memory, and rows do not overlap; oneDNN takes no other layouts."""
    return x.shape[1] > 1 and x.stride(1) == 1 and x.stride(0) >= x.shape[1]
