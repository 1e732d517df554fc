"""Cost: floating-point operations, bytes and workspace of the nodes of a rank graph."""

import operator
from typing import Any

from torch import Tensor, fx

from mpar.ops import Cost, primitive_of
from mpar.sharding import _collectives as collectives
from mpar.sharding._control import CONTROL, Cond, num_turns
from mpar.sharding._control_memory import flow_workspace, held_inside

__all__ = ["graph_cost", "node_cost", "workspace_of"]

_TRANSCENDENTAL = {"cos", "elu", "erf", "exp", "exp2", "expm1", "gelu", "log", "log1p", "log2", "log_sigmoid", "logsumexp"}
_TRANSCENDENTAL |= {"mish", "pow", "sigmoid", "silu", "sin", "softmax", "softplus", "tanh"}
"""Elementwise ops, and reductions over exponentials, that compute one transcendental function for each element."""


def workspace_of(node: fx.Node) -> int:
    """Bytes that an op allocates and frees before it returns; if a kernel was chosen for it, those of the kernel.

    Of control flow, what ops in its bodies add to the bytes of the values there, which `held_inside` counts.
    """
    if node.target in CONTROL.values():
        return flow_workspace(node.kwargs["flow"], _held_in) - held_inside(node)
    return 0 if _is_free(node) else node.meta["workspace"] if "workspace" in node.meta else node_cost(node).workspace


def _held_in(node: fx.Node) -> int:
    """Bytes that an op in a body allocates and frees, and those of the values in bodies of its own."""
    return workspace_of(node) + held_inside(node)


def _is_free(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target is operator.getitem:
        return True
    return node.target in (*collectives.COLLECTIVES, collectives.arrived, collectives.shard, collectives.start)


def node_cost(node: fx.Node) -> Cost:
    """The cost of a node on one rank; nothing for collectives, views and inputs."""
    if _is_free(node):
        return Cost(0, 0)
    if node.target in CONTROL.values():
        return _flow_cost(node.kwargs["flow"])
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


def _flow_cost(flow: Any) -> Cost:
    """The cost of all turns of a loop, or of the branch that computes more."""
    costs = []
    for body in flow.bodies.values():
        nodes = [node_cost(node) for node in body.graph.nodes]
        costs.append(Cost(sum(c.flops for c in nodes), sum(c.bytes for c in nodes), 0, sum(c.transcendentals for c in nodes)))
    if isinstance(flow, Cond):
        return max(costs, key=lambda cost: (cost.flops, cost.bytes))
    turns = num_turns(flow)
    return Cost(
        turns * sum(c.flops for c in costs), turns * sum(c.bytes for c in costs), 0, turns * sum(c.transcendentals for c in costs)
    )


def graph_cost(graph: fx.Graph) -> tuple[int, int]:
    """The bytes that a rank receives in the collectives of a graph, and those that its ops read and write."""
    received = touched = 0
    for node in graph.nodes:
        if node.target in CONTROL.values():
            flow = node.kwargs["flow"]
            costs = [graph_cost(body.graph) for body in flow.bodies.values()]
            received += num_turns(flow) * (max if isinstance(flow, Cond) else sum)(cost[0] for cost in costs)
        elif node.target in collectives.COLLECTIVES:
            received += _received(node)
        touched += node_cost(node).bytes
    return received, touched


def _received(node: fx.Node) -> int:
    size, sent = node.kwargs["size"], collectives.bytes_of(node)
    factors = {collectives.all_gather: size - 1, collectives.all_reduce: 2 * (size - 1) / size, collectives.shift: 1}
    return int(sent * factors.get(node.target, (size - 1) / size))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for item in value for t in _tensors(item)] if isinstance(value, (tuple, list)) else []
