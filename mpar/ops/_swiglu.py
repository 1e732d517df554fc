"""SwiGLU's product: y = silu(gate) * up  (Shazeer 2020, arXiv:2002.05202)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mpar.errors import DtypeError, ShapeError
from mpar.ops._rows import swiglu_backward_rows, swiglu_rows
from mpar.ops.primitive import Cost, Primitive

__all__ = ["swiglu"]

swiglu_p = Primitive("swiglu", "gate, up -> y")


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, element by element; both have the same shape and floating dtype, which the result has.

    Raises ShapeError or DtypeError if they differ.
    """
    return swiglu_p.bind(gate, up)


@swiglu_p.def_abstract
def _abstract(gate, up):
    if gate.shape != up.shape:
        raise ShapeError(f"swiglu: gate is {tuple(gate.shape)}, up is {tuple(up.shape)}; they must be equal")
    if gate.dtype != up.dtype or not gate.is_floating_point():
        raise DtypeError(f"swiglu: gate is {gate.dtype}, up is {up.dtype}; both must have the same floating dtype")
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


@swiglu_p.def_impl
def _impl(gate: Tensor, up: Tensor) -> Tensor:
    y = swiglu_rows(gate, up)
    return F.silu(gate.contiguous()).mul_(up) if y is None else y


@swiglu_p.def_vjp("gate, up, dy -> dgate, dup")
def _vjp(gate, up, dy):
    found = swiglu_backward_rows(gate, up, dy)
    if found is not None:
        return found
    gate, dy = gate.contiguous(), dy.contiguous()
    dgate = dy * up.contiguous()
    return torch.ops.aten.silu_backward.grad_input(dgate, gate, grad_input=dgate), F.silu(gate).mul_(dy)


swiglu_p.def_formula(lambda gate, up: gate * gate.sigmoid() * up)
swiglu_p.def_sharding("..., ... -> ...", linear="up")
swiglu_p.bwd.def_sharding("..., ..., ... -> ..., ...", linear="dy")
swiglu_p.def_batching_leading()
swiglu_p.bwd.def_batching_leading()
swiglu_p.def_cost(lambda gate, up: Cost(flops=5 * gate.numel(), bytes=3 * gate.nbytes, transcendentals=gate.numel()))
swiglu_p.bwd.def_cost(lambda gate, up, dy: Cost(flops=12 * gate.numel(), bytes=5 * gate.nbytes, transcendentals=2 * gate.numel()))
