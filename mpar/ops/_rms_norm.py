"""RMS normalisation: y = x / sqrt(mean(x^2) + eps) * weight  (Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4)."""

import functools

import torch
from torch import Tensor

from mpar.errors import DtypeError, ShapeError
from mpar.ops._rows import rms_norm_backward_rows, rms_norm_rows
from mpar.ops.primitive import Cost, Primitive

__all__ = ["rms_norm"]

rms_norm_p = Primitive("rms_norm", "x, weight? -> y", eps="float")


def rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6) -> Tensor:
    """Scale the last dim of `x` (..., D) to unit root-mean-square, then by `weight` (D,) if there is one.

    Statistics are float32 or wider; the result has the dtype of `x`. `eps` is added to the mean square, before the root.
    Raises DtypeError if `x` is not floating point, ShapeError if `weight` does not fit.
    """
    return rms_norm_p.bind(x, weight, eps=eps)


@rms_norm_p.def_abstract
def _abstract(x, weight, *, eps):
    if not x.is_floating_point():
        raise DtypeError(f"rms_norm: x {tuple(x.shape)} has dtype {x.dtype}, needs a floating dtype")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ShapeError(f"rms_norm: weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}; it must be ({x.shape[-1]},)")
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@rms_norm_p.def_impl
def _impl(x: Tensor, weight: Tensor | None, *, eps: float) -> Tensor:
    found = rms_norm_rows(x, weight, eps)
    if found is not None:
        return found
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()
    y = wide * _rstd(wide, eps)
    y = y.to(x.dtype)
    return y if weight is None else y.mul_(weight) if weight.dtype == y.dtype else (y * weight).to(x.dtype)


@rms_norm_p.def_vjp("x, weight, dy -> dx, dweight")
def _vjp(x, weight, dy, *, eps):
    """With r = rstd, w = weight:  dx = r (w dy - x r^2 mean(w dy x)),  dweight = sum over rows of r dy x.

    Both come from the one product dy x, over which dx is then written: one temporary of the size of x for float32.
    """
    found = rms_norm_backward_rows(x, weight, dy, eps)
    if found is not None:
        return found[0], x.new_empty(0) if found[1] is None else found[1]
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()
    dy = dy.to(wide.dtype).contiguous()
    size, gain = x.shape[-1], wide.new_ones(x.shape[-1]) if weight is None else weight.to(wide.dtype)
    rstd = _rstd(wide, eps)
    product = (dy * wide).view(-1, size)
    dweight = x.new_empty(0) if weight is None else torch.mm(rstd.view(1, -1), product).view(size).to(weight.dtype)
    slope = torch.mv(product, gain).view(rstd.shape).mul_(rstd).mul_(rstd).div_(size)
    dx = torch.mul(dy, gain, out=product.view(dy.shape)).addcmul_(wide, slope, value=-1).mul_(rstd)
    return dx.to(x.dtype), dweight


def _rstd(x: Tensor, eps: float) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(_constant(eps, x), norm, norm, value=1 / x.shape[-1]).rsqrt_()


def _constant(value: float, like: Tensor) -> Tensor:
    """A 0-d tensor with the dtype and device of `like`."""
    if type(like) is not Tensor:  # a trace must not keep its tensors
        return torch.full((), value, dtype=like.dtype, device=like.device)
    return _kept_constant(value, like.dtype, like.device)


@functools.lru_cache(maxsize=64)
def _kept_constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor that is made once: for one row, a number in an operation takes as long as all other operations of a norm."""
    return torch.tensor(value, dtype=dtype, device=device)


@rms_norm_p.def_formula
def _formula(x, weight, *, eps):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y if weight is None else (y * weight).to(x.dtype)


rms_norm_p.def_sharding("... d, d -> ... d", need_replication="d")
rms_norm_p.def_batching_leading()
rms_norm_p.def_cost(lambda x, weight, **_: Cost(flops=5 * x.numel(), bytes=2 * x.nbytes))
rms_norm_p.bwd.def_sharding("... d, d, ... d -> ... d, d", need_replication="d")
rms_norm_p.bwd.def_batching_leading()
rms_norm_p.bwd.def_cost(lambda x, weight, dy, **_: Cost(flops=11 * x.numel(), bytes=3 * x.nbytes))
