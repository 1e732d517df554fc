"""RMS norm of a sum: a branch is added to the residual stream, and the sum is normalised for the next branch, in one op."""

import torch
from torch import Tensor

from mpar.errors import DtypeError, ShapeError
from mpar.ops._rms_norm import rms_norm_p
from mpar.ops.primitive import Cost, Primitive

__all__ = ["add_rms_norm"]

add_rms_norm_p = Primitive("add_rms_norm", "x, residual, weight? -> y, total", eps="float")
add_rms_norm_bwd_p = Primitive("add_rms_norm_bwd", "total, weight?, dy, dtotal? -> dx, dweight", eps="float")


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """`(rms_norm(total, weight), total)` with `total = x + residual`, rounded to the dtype that they share; both (..., D).

    It has the same bits as an addition and an `rms_norm`. `weight` is (D,).
    Raises ShapeError or DtypeError if the operands do not fit each other.
    """
    return add_rms_norm_p.bind(x, residual, weight, eps=eps)


def check_sum(name: str, x: Tensor, residual: Tensor) -> None:
    """Raise unless both have the same shape (..., D) and the same floating dtype."""
    if x.shape != residual.shape or x.ndim < 1:
        raise ShapeError(f"{name}: x is {tuple(x.shape)}, residual {tuple(residual.shape)}; both must be the same (..., D)")
    if x.dtype != residual.dtype or not x.is_floating_point():
        raise DtypeError(f"{name}: x is {x.dtype}, residual {residual.dtype}; both must have the same floating dtype")


def check_cotangents(name: str, total: Tensor, dy: Tensor, dtotal: Tensor | None) -> None:
    """Raise unless the cotangents have the shape of `total`, and `dtotal` its dtype too."""
    wrong = {k: tuple(d.shape) for k, d in {"dy": dy, "dtotal": dtotal}.items() if d is not None and d.shape != total.shape}
    if wrong:
        raise ShapeError(f"{name}: {wrong} do not fit total {tuple(total.shape)}")
    if dtotal is not None and dtotal.dtype != total.dtype:
        raise DtypeError(f"{name}: dtotal is {dtotal.dtype}, total {total.dtype}; they must be equal")


@add_rms_norm_p.def_abstract
def _abstract(x, residual, weight, *, eps):
    check_sum("add_rms_norm", x, residual)
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ShapeError(
            f"add_rms_norm: weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}; it must be ({x.shape[-1]},)"
        )
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return y, torch.empty_like(y)


@add_rms_norm_p.def_impl
def _impl(x: Tensor, residual: Tensor, weight: Tensor | None, *, eps: float) -> tuple[Tensor, Tensor]:
    total = torch.add(x, residual, out=torch.empty(x.shape, dtype=x.dtype, device=x.device))
    assert rms_norm_p.impl is not None
    return rms_norm_p.impl(total, weight, eps=eps), total


@add_rms_norm_p.def_vjp_by_ops("total, weight, dy, dtotal -> dx, dresidual, dweight")
def _vjp(total, weight, dy, dtotal, *, eps):
    if dy is None:
        return dtotal, dtotal, None
    dx, dweight = add_rms_norm_bwd_p.bind(total, weight, dy, dtotal, eps=eps)
    return dx, dx, dweight


@add_rms_norm_bwd_p.def_abstract
def _abstract_bwd(total, weight, dy, dtotal, *, eps):
    check_cotangents("add_rms_norm_bwd", total, dy, dtotal)
    dx = torch.empty(total.shape, dtype=total.dtype, device=total.device)
    return dx, total.new_empty(0) if weight is None else torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)


@add_rms_norm_bwd_p.def_impl
def _impl_bwd(total: Tensor, weight: Tensor | None, dy: Tensor, dtotal: Tensor | None, *, eps: float) -> tuple[Tensor, Tensor]:
    """`dx` is the gradient of `x` and also of `residual`: the gradient through the norm, rounded, plus `dtotal`."""
    dx, dweight = rms_norm_p.bwd.impl(total, weight, dy, eps=eps)
    return dx if dtotal is None else dx.add_(dtotal), dweight


@add_rms_norm_bwd_p.def_vjp_by_ops("total, weight, dy, ddx, ddweight -> dtotal, dweight, ddy, ddtotal")
def _vjp_bwd(total, weight, dy, ddx, ddweight, *, eps):
    return *rms_norm_p.bwd.transforms.vjp.fn(total, weight, dy, ddx, ddweight, eps=eps), ddx


add_rms_norm_p.def_sharding("... d, ... d, d -> ... d, ... d", need_replication="d")
add_rms_norm_p.def_batching_leading()
add_rms_norm_p.def_cost(lambda x, residual, weight, **_: Cost(flops=6 * x.numel(), bytes=4 * x.nbytes))
add_rms_norm_bwd_p.def_sharding("... d, d, ... d, ... d -> ... d, d", need_replication="d")
add_rms_norm_bwd_p.def_batching_loop()


@add_rms_norm_bwd_p.def_cost
def _cost_bwd(total, weight, dy, dtotal, *, eps):
    return Cost(flops=12 * total.numel(), bytes=(3 if dtotal is None else 4) * total.nbytes)
