"""GEGLU's product: y = gelu(gate) * up  (Shazeer 2020, arXiv:2002.05202; gelu: Hendrycks & Gimpel 2016, arXiv:1606.08415)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mpar.errors import ConfigError, DtypeError, ShapeError
from mpar.ops.primitive import Cost, Primitive

__all__ = ["geglu"]

geglu_p = Primitive("geglu", "gate, up -> y", approximate="str")


def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """`gelu(gate) * up`, element by element; both have the same shape and floating dtype, which the result has.

    `approximate` is "none" (by the error function) or "tanh". Raises ShapeError or DtypeError if the operands differ,
    ConfigError for another `approximate`.
    """
    return geglu_p.bind(gate, up, approximate=approximate)


@geglu_p.def_abstract
def _abstract(gate, up, *, approximate):
    if approximate not in ("none", "tanh"):
        raise ConfigError(f'geglu: approximate is {approximate!r}; it must be "none" or "tanh"')
    if gate.shape != up.shape:
        raise ShapeError(f"geglu: gate is {tuple(gate.shape)}, up is {tuple(up.shape)}; they must be equal")
    if gate.dtype != up.dtype or not gate.is_floating_point():
        raise DtypeError(f"geglu: gate is {gate.dtype}, up is {up.dtype}; both must have the same floating dtype")
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


@geglu_p.def_impl
def _impl(gate: Tensor, up: Tensor, *, approximate: str) -> Tensor:
    return F.gelu(gate.contiguous(), approximate=approximate).mul_(up)


@geglu_p.def_vjp("gate, up, dy -> dgate, dup")
def _vjp(gate, up, dy, *, approximate):
    gate, dy = gate.contiguous(), dy.contiguous()
    dgate = torch.ops.aten.gelu_backward(dy * up, gate, approximate=approximate)
    return dgate.contiguous(), F.gelu(gate, approximate=approximate).mul_(dy)


geglu_p.def_formula(lambda gate, up, *, approximate: F.gelu(gate, approximate=approximate) * up)
geglu_p.def_sharding("..., ... -> ...", linear="up")
geglu_p.bwd.def_sharding("..., ..., ... -> ..., ...", linear="dy")
geglu_p.def_batching_leading()
geglu_p.bwd.def_batching_leading()
geglu_p.def_cost(lambda gate, up, **_: Cost(flops=10 * gate.numel(), bytes=3 * gate.nbytes, transcendentals=gate.numel()))


@geglu_p.bwd.def_cost
def _cost_bwd(gate, up, dy, **_):
    n = gate.numel()
    return Cost(flops=25 * n, bytes=5 * gate.nbytes, workspace=gate.nbytes, transcendentals=2 * n)
