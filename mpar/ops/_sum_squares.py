"""Sum of squares of all elements: what one tensor contributes to the norm of gradients."""

import torch
from torch import Tensor

from mpar.errors import DtypeError
from mpar.ops.primitive import Cost, Primitive

__all__ = ["sum_squares"]

sum_squares_p = Primitive("sum_squares", "x -> y")

_ROW = 4096  # elements added in the working precision; the sums of rows are added in float64


def sum_squares(x: Tensor) -> Tensor:
    """`sum(x ** 2)`, a scalar in float32 or wider; equal tensors of the same shape always give the same bits.

    Raises DtypeError if `x` is not floating point.
    """
    return sum_squares_p.bind(x)


@sum_squares_p.def_abstract
def _abstract(x):
    if not x.is_floating_point():
        raise DtypeError(f"sum_squares: x {tuple(x.shape)} has dtype {x.dtype}, needs a floating dtype")
    return torch.empty((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


@sum_squares_p.def_impl
def _impl(x: Tensor) -> Tensor:
    wide, flat = torch.promote_types(x.dtype, torch.float32), x.reshape(-1)
    if flat.numel() <= _ROW:
        norms = torch.linalg.vector_norm(flat, dtype=wide)
    else:
        even = flat.numel() // _ROW * _ROW
        norms = torch.linalg.vector_norm(flat[:even].view(-1, _ROW), dim=1, dtype=wide)
        if even < flat.numel():
            norms = torch.cat([norms, torch.linalg.vector_norm(flat[even:], dim=0, keepdim=True, dtype=wide)])
    return torch.linalg.vector_norm(norms, dtype=torch.float64).square_().to(wide)


@sum_squares_p.def_vjp_by_ops("x, dy -> dx")
def _vjp(x, dy):
    return (2 * dy).to(x.dtype) * x


sum_squares_p.def_sharding("... -> ")
sum_squares_p.def_batching_loop()
sum_squares_p.def_cost(lambda x: Cost(flops=2 * x.numel(), bytes=x.nbytes))
