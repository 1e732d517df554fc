"""Layer normalisation: y = (x - mean) / sqrt(variance + eps) * weight + bias  (Ba et al. 2016, arXiv:1607.06450)."""

import torch
from torch import Tensor

from mpar.errors import DtypeError, ShapeError
from mpar.ops.primitive import Cost, Primitive

__all__ = ["layer_norm"]

layer_norm_p = Primitive("layer_norm", "x, weight?, bias? -> y", eps="float")


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """Shift and scale the last dim of `x` (..., D) to mean 0 and variance 1, then apply `* weight + bias` if given, both (D,).

    Statistics are float32 or wider; the result has the dtype of `x`. `eps` is added to the (biased) variance.
    Raises DtypeError if `x` is not floating point, ShapeError if `weight` or `bias` does not fit.
    """
    return layer_norm_p.bind(x, weight, bias, eps=eps)


@layer_norm_p.def_abstract
def _abstract(x, weight, bias, *, eps):
    if not x.is_floating_point():
        raise DtypeError(f"layer_norm: x {tuple(x.shape)} has dtype {x.dtype}, needs a floating dtype")
    given = {"weight": weight, "bias": bias}
    wrong = {name: tuple(p.shape) for name, p in given.items() if p is not None and (x.ndim < 1 or p.shape != x.shape[-1:])}
    if wrong or x.ndim < 1:
        raise ShapeError(f"layer_norm: {wrong} do not fit x {tuple(x.shape)}; x must be (..., D), weight and bias (D,)")
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@layer_norm_p.def_impl
def _impl(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float) -> Tensor:
    wide, weight, bias = _one_dtype(x, weight, bias)
    return torch.native_layer_norm(wide.contiguous(), x.shape[-1:], weight, bias, eps)[0].to(x.dtype)


@layer_norm_p.def_vjp("x, weight, bias, dy -> dx, dweight, dbias")
def _vjp(x, weight, bias, dy, *, eps):
    wide, wide_weight, wide_bias = _one_dtype(x, weight, bias)
    wide, shape = wide.contiguous(), x.shape[-1:]
    _, mean, rstd = torch.native_layer_norm(wide, shape, None, None, eps)
    needs = [True, weight is not None, bias is not None]
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        dy.to(wide.dtype).contiguous(), wide, shape, mean, rstd, wide_weight, wide_bias, needs
    )
    dweight = x.new_empty(0) if weight is None else dweight.to(weight.dtype)
    return dx.to(x.dtype), dweight, x.new_empty(0) if bias is None else dbias.to(bias.dtype)


def _one_dtype(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The operands in one dtype, which the kernel needs: their own if it is the same for all, else float32 or wider."""
    given = [operand for operand in (x, weight, bias) if operand is not None]
    if all(operand.dtype == x.dtype for operand in given):
        return x, weight, bias
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.to(wide), None if weight is None else weight.to(wide), None if bias is None else bias.to(wide)


layer_norm_p.def_formula(_impl)
layer_norm_p.def_sharding("... d, d, d -> ... d", need_replication="d")
layer_norm_p.bwd.def_sharding("... d, d, d, ... d -> ... d, d, d", need_replication="d")
layer_norm_p.def_batching_leading()
layer_norm_p.bwd.def_batching_leading()
layer_norm_p.def_cost(lambda x, weight, bias, **_: Cost(flops=8 * x.numel(), bytes=2 * x.nbytes))
layer_norm_p.bwd.def_cost(lambda x, weight, bias, dy, **_: Cost(flops=16 * x.numel(), bytes=3 * x.nbytes, workspace=x.nbytes))
