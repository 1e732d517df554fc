"""Marks for the compiler: `constrain` says how a tensor is placed, `name` how it is called. Elsewhere they are identities."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import EllipsisType

import torch
from torch import Tensor

from mpar.errors import ShapeError
from mpar.ops.primitive import Cost, Primitive
from mpar.spec import P

__all__ = ["Marks", "constrain", "decode_axes", "marking", "name"]

Marks = tuple[str | EllipsisType | None, ...]
"""Logical names of a tensor's dims; None is a dim that is not sharded, `...` one whose placement does not change."""

constrain_p = Primitive("constrain", "x -> y", axes="str", mark="int")
constrain_bwd_p = Primitive("constrain_bwd", "dy -> dx", mark="int")
name_p = Primitive("named", "x -> y", label="str")  # torch.ops.mpar.name is taken by torch

_marks: ContextVar[Iterator[int] | None] = ContextVar("mpar_marks", default=None)


@contextmanager
def marking() -> Iterator[None]:
    """While this is open, marks become graph nodes; the tracer opens it."""
    token = _marks.set(itertools.count())
    try:
        yield
    finally:
        _marks.reset(token)


def constrain(x: Tensor, axes: Marks | P) -> Tensor:
    """Place `x` as the strategy's table maps its logical `axes`, one for each dim; or exactly by a spec `P(...)`.

    A dim for which `...` is given keeps its placement, except for mesh axes that the named dims need; pending sums then stay
    pending. Backward, the cotangent is placed by what `x` was before: along mesh axes that sharded `x` it is sharded, along those
    of a pending sum it is replicated, and along those that replicated `x` it stays as it is. Outside compilation this is the
    identity.
    """
    if not isinstance(axes, P) and len(axes) != x.ndim:
        raise ShapeError(f"constrain: x {tuple(x.shape)} has {x.ndim} dims, axes {tuple(axes)} name {len(axes)}")
    marks = _marks.get()
    return x if marks is None else constrain_p.bind(x, axes=_encode_axes(axes), mark=next(marks))


def name(x: Tensor, label: str) -> Tensor:
    """Call the value `label`, for recompute policies and printing. Outside compilation this is the identity."""
    return x if _marks.get() is None else name_p.bind(x, label=label)


def decode_axes(text: str) -> Marks | P:
    """The axes of a `constrain` node, which holds them as the string `text`."""
    kind, _, rest = text.partition(":")
    dims = rest.split(",") if rest else []
    if kind == "spec":
        return P(*(tuple(dim.split("+")) if dim else None for dim in dims))
    return tuple(... if dim == "..." else dim or None for dim in dims)


def _encode_axes(axes: Marks | P) -> str:
    if isinstance(axes, P):
        return "spec:" + ",".join("+".join(dim) for dim in axes.dims)
    return "names:" + ",".join("..." if axis is ... else axis or "" for axis in axes)


def _identity_like(x: Tensor, **_: object) -> Tensor:
    return torch.empty_like(x)  # with the strides that clone gives: an expanded x becomes dense


def _batched(primitive: Primitive) -> None:
    """Define the batching rule of a mark: the batch is one more leading dim, which is not sharded."""

    def rule(size, dims, x, **params):
        if "axes" in params:
            kind, _, rest = params["axes"].partition(":")
            params["axes"] = f"{kind}:," + rest
        return primitive.bind(x.movedim(dims[0], 0), **params), 0

    primitive.def_batching(rule)


for _primitive in (constrain_p, constrain_bwd_p, name_p):
    _primitive.def_abstract(_identity_like)
    _primitive.def_impl(lambda x, **_: x.clone(memory_format=torch.preserve_format))
    _primitive.def_sharding("... -> ...", linear=_primitive.operands[0])
    _primitive.def_cost(lambda x, **_: Cost(flops=0, bytes=0))
    _batched(_primitive)


@constrain_p.def_vjp_by_ops("dy -> dx")
def _constrain_vjp(dy, *, axes, mark):
    return constrain_bwd_p.bind(dy, mark=mark)


@constrain_bwd_p.def_vjp_by_ops("ddx -> ddy")  # second derivatives stay where their ops make them
def _constrain_bwd_vjp(ddx, *, mark):
    return ddx


@name_p.def_vjp_by_ops("dy -> dx")
def _name_vjp(dy, *, label):
    return dy
