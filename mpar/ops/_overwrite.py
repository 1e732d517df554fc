"""Overwrite: a value is copied over another one, which the caller gives up. The compiler replaces state with it."""

import torch
from torch import Tensor

from mpar.errors import ShapeError
from mpar.ops.primitive import Cost, Primitive

__all__ = ["overwrite"]

overwrite_p = Primitive("overwrite", "old, new -> result")
overwrite_p.mutates = ("old",)


def overwrite(old: Tensor, new: Tensor) -> Tensor:
    """`old` itself, with the values of `new`, which has its shape and dtype. The caller must not read `old` as it was afterwards.

    There is no gradient. Raises ShapeError if the operands do not fit each other.
    """
    return overwrite_p.bind(old, new)


@overwrite_p.def_abstract
def _abstract(old, new):
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        raise ShapeError(f"overwrite: old is {old.dtype} {tuple(old.shape)}, new is {new.dtype} {tuple(new.shape)}")
    return torch.empty(old.shape, dtype=old.dtype, device=old.device)


@overwrite_p.def_impl
def _impl(old: Tensor, new: Tensor) -> Tensor:
    return old.copy_(new)


overwrite_p.def_sharding("..., ... -> ...")
overwrite_p.def_batching_loop()


@overwrite_p.def_cost
def _cost(old, new):
    return Cost(flops=0, bytes=old.nbytes + new.nbytes)
