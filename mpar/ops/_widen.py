"""Widen: a cast to a wider floating dtype through which a pending sum stays pending, so that it is summed in the wider dtype."""

import torch
from torch import Tensor

from mpar.errors import DtypeError
from mpar.ops.primitive import Cost, Primitive

__all__ = ["widen"]

widen_p = Primitive("widen", "x -> y", dtype="ScalarType")
widen_p.placement.may_grow_pending = True


def widen(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`, which holds every value of `x` exactly. A plain cast would first reduce a pending sum, in the narrow dtype.

    Raises DtypeError if `dtype` is narrower than that of `x`.
    """
    return x if x.dtype == dtype else widen_p.bind(x, dtype=dtype)


@widen_p.def_abstract
def _abstract(x, *, dtype):
    if not x.is_floating_point() or torch.promote_types(x.dtype, dtype) != dtype:
        raise DtypeError(f"widen: x {tuple(x.shape)} has dtype {x.dtype}, which {dtype} does not hold exactly")
    return torch.empty(x.shape, dtype=dtype, device=x.device)


@widen_p.def_impl
def _impl(x: Tensor, *, dtype: torch.dtype) -> Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device).copy_(x)


@widen_p.def_vjp_by_ops("x, dy -> dx")
def _vjp(x, dy, *, dtype):
    return dy.to(x.dtype)


widen_p.def_sharding("... -> ...", linear="x")
widen_p.def_batching_leading()
widen_p.def_cost(lambda x, *, dtype: Cost(flops=x.numel(), bytes=x.numel() * (x.element_size() + dtype.itemsize)))
