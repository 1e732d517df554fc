"""Cost: floating-point operations, bytes and workspace of a rank graph, added over its nodes."""

import operator
from typing import Any

from torch import Tensor, fx

from mpar.ops._primitive import Cost, primitive_of
from mpar.sharding import _collectives as collectives

__all__ = ["graph_cost"]


def graph_cost(graph: fx.Graph) -> Cost:
    """FLOPs and bytes of one run on one rank, and the largest workspace of any op; collectives are priced elsewhere."""
    flops = nbytes = workspace = 0
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        if node.target in (*collectives.COLLECTIVES, collectives.shard, collectives.start):
            continue
        cost = _node_cost(node)
        within = node.meta.get("workspace", cost.workspace)  # a kernel's own, where one was chosen
        flops, nbytes, workspace = flops + cost.flops, nbytes + cost.bytes, max(workspace, within)
    return Cost(flops, nbytes, workspace)


def _node_cost(node: fx.Node) -> Cost:
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
