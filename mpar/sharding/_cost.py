"""Cost: floating-point operations, bytes and workspace of the nodes of a rank graph."""

import operator
from typing import Any

from torch import Tensor, fx

from mpar.ops import Cost, primitive_of
from mpar.sharding import _collectives as collectives

__all__ = ["node_cost", "workspace_of"]


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
    return Cost(sum(v.numel() for v in out), sum(v.nbytes for v in (*out, *_tensors(args))))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for item in value for t in _tensors(item)] if isinstance(value, (tuple, list)) else []
