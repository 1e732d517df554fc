"""Cost: floating-point operations, bytes and workspace of the nodes of a rank graph."""

import operator
from typing import Any

from torch import Tensor, fx

from mpar.ops import Cost, primitive_of
from mpar.sharding import _collectives as collectives

__all__ = ["node_cost", "workspace_of"]

_TRANSCENDENTAL = {"cos", "elu", "erf", "exp", "exp2", "expm1", "gelu", "log", "log1p", "log2", "log_sigmoid", "logsumexp"}
_TRANSCENDENTAL |= {"mish", "pow", "sigmoid", "silu", "sin", "softmax", "softplus", "tanh"}
"""Elementwise ops, and reductions over exponentials, that compute one transcendental function for each element."""


def workspace_of(node: fx.Node) -> int:
    """Bytes that an op allocates and frees before it returns; if a kernel was chosen for it, those of the kernel."""
    return 0 if _is_free(node) else node.meta["workspace"] if "workspace" in node.meta else node_cost(node).workspace


def _is_free(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target is operator.getitem:
        return True
    return node.target in (*collectives.COLLECTIVES, collectives.arrived, collectives.shard, collectives.start)


def node_cost(node: fx.Node) -> Cost:
    """The cost of a node on one rank; nothing for collectives, views and inputs."""
    if _is_free(node):
        return Cost(0, 0)
    primitive = primitive_of(node.target)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    if primitive is not None and primitive.cost is not None:
        return primitive.cost(*args, **kwargs)
    if getattr(node.target, "is_view", False):
        return Cost(0, 0)
    out = _tensors(node.meta["val"])
    n = sum(v.numel() for v in out)
    name = str(getattr(node.target, "overloadpacket", node.target)).removeprefix("aten.").strip("_")
    transcendentals = n if name.removesuffix("_backward") in _TRANSCENDENTAL else 0
    return Cost(n, sum(v.nbytes for v in (*out, *_tensors(args))), transcendentals=transcendentals)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for item in value for t in _tensors(item)] if isinstance(value, (tuple, list)) else []
