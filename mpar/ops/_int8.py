"""int8: weights as 8-bit integers with a scale for each row, as in bitsandbytes (Dettmers et al. 2022, arXiv:2208.07339)."""

from typing import Generic

import torch
from torch import Tensor

from mpar.errors import DtypeError, ShapeError
from mpar.ops.primitive import Cost, Primitive
from mpar.tree import Leaf, struct

__all__ = ["Int8", "dequantise_int8", "quantise_int8"]

dequantise_int8_p = Primitive("dequantise_int8", "codes, absmax -> w", dtype="ScalarType")

_LARGEST = 127


@struct
class Int8(Generic[Leaf]):
    """A quantised matrix: codes int8 (..., R, C); absmax int32 (..., R), the bits of float32: the largest magnitude of a row."""

    codes: Leaf
    absmax: Leaf


def quantise_int8(w: Tensor) -> Int8[Tensor]:
    """The matrix `w` (R, C), or the matrices (E, R, C), in int8. Raises DtypeError unless it is floating."""
    if not w.is_floating_point():
        raise DtypeError(f"cannot quantise a weight of {w.dtype} to int8: it must be floating")
    absmax = w.abs().amax(-1).float()
    factor = torch.where(absmax > 0, _LARGEST / absmax, 0.0)[..., None]
    return Int8(torch.round(w * factor).to(torch.int8), absmax.view(torch.int32))


def dequantise_int8(parts: Int8[Tensor], *, dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix or matrices in `dtype`, computed in float32. They have no gradient. Raises ShapeError or DtypeError."""
    return dequantise_int8_p.bind(parts.codes, parts.absmax, dtype=dtype)


@dequantise_int8_p.def_abstract
def _abstract(codes, absmax, *, dtype):
    if codes.ndim < 2 or absmax.shape != codes.shape[:-1]:
        raise ShapeError(
            f"dequantise_int8: codes {tuple(codes.shape)} and absmax {tuple(absmax.shape)} must be (..., R, C) and (..., R)"
        )
    if (codes.dtype, absmax.dtype) != (torch.int8, torch.int32):
        raise DtypeError(
            f"dequantise_int8: codes are {codes.dtype} and absmax {absmax.dtype}; they must be int8, and int32 for float32"
        )
    return torch.empty(codes.shape, dtype=dtype, device=codes.device)


@dequantise_int8_p.def_impl
def _impl(codes: Tensor, absmax: Tensor, *, dtype: torch.dtype) -> Tensor:
    return (codes.float() * absmax.view(torch.float32)[..., None] * (1.0 / _LARGEST)).to(dtype)


dequantise_int8_p.def_sharding("... r c, ... r -> ... r c")
dequantise_int8_p.def_batching_loop()
dequantise_int8_p.def_cost(
    lambda codes, absmax, *, dtype: Cost(
        flops=2 * codes.numel(),
        bytes=codes.nbytes + absmax.nbytes + codes.numel() * dtype.itemsize,
        workspace=8 * codes.numel(),
    )
)
