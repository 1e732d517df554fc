"""Layer norm of a sum: a branch is added to the residual stream, and the sum is normalised for the next branch, in one op."""

import torch
from torch import Tensor

from mpar.errors import ShapeError
from mpar.ops._add_rms_norm import check_cotangents, check_sum
from mpar.ops._layer_norm import layer_norm_p
from mpar.ops.primitive import Cost, Primitive

__all__ = ["add_layer_norm"]

add_layer_norm_p = Primitive("add_layer_norm", "x, residual, weight?, bias? -> y, total", eps="float")
add_layer_norm_bwd_p = Primitive("add_layer_norm_bwd", "total, weight?, bias?, dy, dtotal? -> dx, dweight, dbias", eps="float")


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """`(layer_norm(total, weight, bias), total)` with `total = x + residual`, rounded to the dtype that they share; all (..., D).

    It has the same bits as an addition and a `layer_norm`. `weight` and `bias` are (D,).
    Raises ShapeError or DtypeError if the operands do not fit each other.
    """
    return add_layer_norm_p.bind(x, residual, weight, bias, eps=eps)


@add_layer_norm_p.def_abstract
def _abstract(x, residual, weight, bias, *, eps):
    check_sum("add_layer_norm", x, residual)
    given = {"weight": weight, "bias": bias}
    wrong = {name: tuple(p.shape) for name, p in given.items() if p is not None and p.shape != x.shape[-1:]}
    if wrong:
        raise ShapeError(f"add_layer_norm: {wrong} do not fit x {tuple(x.shape)}; weight and bias must be ({x.shape[-1]},)")
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return y, torch.empty_like(y)


@add_layer_norm_p.def_impl
def _impl(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float) -> tuple[Tensor, Tensor]:
    total = torch.add(x, residual, out=torch.empty(x.shape, dtype=x.dtype, device=x.device))
    assert layer_norm_p.impl is not None
    return layer_norm_p.impl(total, weight, bias, eps=eps), total


@add_layer_norm_p.def_vjp_by_ops("total, weight, bias, dy, dtotal -> dx, dresidual, dweight, dbias")
def _vjp(total, weight, bias, dy, dtotal, *, eps):
    if dy is None:
        return dtotal, dtotal, None, None
    dx, dweight, dbias = add_layer_norm_bwd_p.bind(total, weight, bias, dy, dtotal, eps=eps)
    return dx, dx, dweight, dbias


@add_layer_norm_bwd_p.def_abstract
def _abstract_bwd(total, weight, bias, dy, dtotal, *, eps):
    check_cotangents("add_layer_norm_bwd", total, dy, dtotal)
    likes = [(total.shape, total.dtype)] + [((0,), total.dtype) if p is None else (p.shape, p.dtype) for p in (weight, bias)]
    return tuple(torch.empty(shape, dtype=dtype, device=total.device) for shape, dtype in likes)


@add_layer_norm_bwd_p.def_impl
def _impl_bwd(
    total: Tensor, weight: Tensor | None, bias: Tensor | None, dy: Tensor, dtotal: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`dx` is the gradient of `x` and also of `residual`: the gradient through the norm, rounded, plus `dtotal`."""
    dx, dweight, dbias = layer_norm_p.bwd.impl(total, weight, bias, dy, eps=eps)
    return dx if dtotal is None else dx.add_(dtotal), dweight, dbias


@add_layer_norm_bwd_p.def_vjp_by_ops("total, weight, bias, dy, ddx, ddweight, ddbias -> dtotal, dweight, dbias, ddy, ddtotal")
def _vjp_bwd(total, weight, bias, dy, ddx, ddweight, ddbias, *, eps):
    return *layer_norm_p.bwd.transforms.vjp.fn(total, weight, bias, dy, ddx, ddweight, ddbias, eps=eps), ddx


add_layer_norm_p.def_sharding("... d, ... d, d, d -> ... d, ... d", need_replication="d")
add_layer_norm_p.def_batching_leading()
add_layer_norm_p.def_cost(lambda x, residual, weight, bias, **_: Cost(flops=9 * x.numel(), bytes=4 * x.nbytes))
add_layer_norm_bwd_p.def_sharding("... d, d, d, ... d, ... d -> ... d, d, d", need_replication="d")
add_layer_norm_bwd_p.def_batching_loop()


@add_layer_norm_bwd_p.def_cost
def _cost_bwd(total, weight, bias, dy, dtotal, *, eps):
    reads = 3 if dtotal is None else 4
    return Cost(flops=17 * total.numel(), bytes=reads * total.nbytes, workspace=total.nbytes)
