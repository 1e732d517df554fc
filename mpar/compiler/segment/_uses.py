"""Uses: what the ops and the collectives of a rank graph cost, in their order, from which the time of a kind is predicted."""

import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, fx

from mpar.ir import CollectiveUse, OpUse, Stretch
from mpar.ops import primitive_of
from mpar.sharding import CONTROL, Cond, collectives, node_cost, num_turns

__all__ = ["collective_use", "collective_uses", "op_use", "stretches_of"]


def stretches_of(graph: fx.Graph) -> tuple[Stretch, ...]:
    """The ops of a graph between posting messages and waiting for them; collectives have the numbers of `collective_uses`."""
    out: list[Stretch] = []
    awaits: list[int] = []
    ops: list[fx.Node] = []
    posts: list[int] = []
    numbers: dict[fx.Node, int] = {}  # the number of the last message that each collective has posted
    num_posted = 0
    costs_nothing = functools.cache(_costs_nothing)

    def end() -> None:
        out.append(Stretch(tuple(awaits), _count_ops(ops), tuple(posts)))
        for part in (awaits, ops, posts):
            part.clear()

    for node in _as_run(graph):
        is_message = node.target in collectives.COLLECTIVES
        if is_message:
            numbers[node], num_posted = num_posted, num_posted + 1
            posts.append(numbers[node])
        elif node.target is not collectives.arrived and costs_nothing(node):
            continue
        elif posts or (node.target is collectives.arrived and ops):
            end()
        if node.target is collectives.arrived:
            awaits.append(numbers[node.args[0]])
        elif is_message:
            if not collectives.is_posted(node):
                end()
                awaits.append(numbers[node])
        else:
            ops.append(node)
    end()
    return tuple(out)


def _as_run(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes of a graph as a rank runs them: control flow that communicates turn by turn, of branches the one that sends more;
    other control flow is one op."""
    for node in graph.nodes:
        flow = node.kwargs["flow"] if node.target in CONTROL.values() else None
        bodies = [] if flow is None else [list(_as_run(body.graph)) for body in flow.bodies.values()]
        if flow is None or not any(_messages(body) for body in bodies):
            yield node
            continue
        for body in [max(bodies, key=_messages)] if isinstance(flow, Cond) else bodies * num_turns(flow):
            yield from body


def _messages(nodes: Iterable[fx.Node]) -> int:
    """The bytes that a rank contributes to the collectives among some nodes."""
    return sum(collectives.bytes_of(node) for node in nodes if node.target in collectives.COLLECTIVES)


def _costs_nothing(node: fx.Node) -> bool:
    use = op_use(node)
    return not (use.bytes or use.flops)


def _count_ops(nodes: Iterable[fx.Node]) -> tuple[OpUse, ...]:
    """What each node costs on one rank, in order of first use."""
    uses = Counter(map(op_use, nodes))
    return tuple(replace(use, calls=calls) for use, calls in uses.items())


def op_use(node: fx.Node) -> OpUse:
    """What a node costs on one rank; nothing for views, inputs and collectives."""
    cost, primitive = node_cost(node), primitive_of(node.target)
    name = "" if primitive is None else primitive.name
    return OpUse(cost.flops, cost.bytes, _dtype_name(node), name, cost.transcendentals, cost.matmul, cost.attention)


def _dtype_name(node: fx.Node) -> str:
    """The narrowest floating dtype among the operands of a node, or its own if it has none: "bfloat16"."""
    values = [used.meta.get("val") for used in node.all_input_nodes] or [node.meta.get("val")]
    dtypes = [value.dtype for value in values if isinstance(value, Tensor) and value.dtype.is_floating_point]
    return str(min(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)).removeprefix("torch.")


def collective_uses(graph: fx.Graph) -> tuple[CollectiveUse, ...]:
    """A description of every collective in the graph, in order."""
    return tuple(collective_use(node) for node in _as_run(graph) if node.target in collectives.COLLECTIVES)


def collective_use(node: fx.Node) -> CollectiveUse:
    """A description of one collective."""
    num_tensors = len(node.args[0]) if isinstance(node.args[0], (list, tuple)) else 1
    nbytes, posts_only = collectives.bytes_of(node), node.target in collectives.POSTED
    ragged_factor = node.args[0][0].meta.get("ragged", 1) if posts_only else 0
    return CollectiveUse(
        node.target.__name__,
        node.kwargs["axes"],
        node.kwargs["size"],
        nbytes,
        num_tensors,
        node.meta.get("line", ""),
        node.target is collectives.exchange_rows,
        nbytes * ragged_factor,
    )
