"""Join products: the products of one value with several parameters become one, where nothing is differentiated."""

from collections.abc import Sequence

import torch
from torch import fx

from mpar.ops import PRIMITIVES, summed_dims

__all__ = ["join_products", "neighbours"]

aten = torch.ops.aten
EINSUM, JOINED = PRIMITIVES["einsum"].op, PRIMITIVES["joined_linear"].op


def join_products(graph: fx.Graph, params: Sequence[fx.Node]) -> dict[str, int]:
    """Join products of the same value, by the same equation, with operands of the graph that are among `params`.

    before:  %q = einsum(%x, %wq, 'bsd,dnh->bsnh'); %k = einsum(%x, %wk, 'bsd,dnh->bsnh')
    after:   %y = joined_linear(%x, [%wq, %wk], 'bsd,dnh->bsnh'); %q = view(%y[..., :a], ...); %k = view(%y[..., a:], ...)
    """
    groups: dict[tuple[fx.Node, str], list[fx.Node]] = {}
    known = set(params)
    for node in graph.nodes:
        if node.target == EINSUM and node.args[1] in known and summed_dims(node.kwargs["equation"]) is not None:
            groups.setdefault((node.args[0], node.kwargs["equation"]), []).append(node)
    several = [nodes for nodes in groups.values() if len({node.args[1] for node in nodes}) == len(nodes) > 1]
    for nodes in several:
        _join(graph, nodes)
    graph.lint()
    return {"products_joined": sum(map(len, several))}


def _join(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    first = nodes[0]
    x, weights, equation = first.args[0], [node.args[1] for node in nodes], first.kwargs["equation"]
    rows = x.meta["val"].ndim - (summed_dims(equation) or 0)
    with graph.inserting_before(first):
        joined = _call(graph, first, JOINED, (x, weights), equation=equation)
        start = 0
        for node in nodes:
            shape = list(node.meta["val"].shape)
            end = start + node.meta["val"].shape[rows:].numel()
            part = _call(graph, node, aten.slice.Tensor, (joined, rows, start, end))
            node.replace_all_uses_with(_call(graph, node, aten.view.default, (part, shape)))
            start = end
    for node in nodes:
        graph.erase_node(node)


def _call(graph: fx.Graph, like: fx.Node, target: object, args: tuple[object, ...], **params: object) -> fx.Node:
    """A new node with the metadata of `like`, but for its value."""
    node = graph.call_function(target, args, params)  # type: ignore[arg-type]
    value = target(*fx.node.map_arg(args, lambda n: n.meta["val"]), **params)  # type: ignore[operator]
    node.meta = dict(like.meta) | {"val": value}
    return node


def neighbours(graph: fx.Graph) -> tuple[tuple[tuple[int, ...], int], ...]:
    """For each joined product of a graph, which of its operands the weights are, and how many of their first dims are summed."""
    number = {node: index for index, node in enumerate(graph.find_nodes(op="placeholder"))}
    joined = [node for node in graph.nodes if node.target == JOINED]
    return tuple((tuple(number[w] for w in node.args[1]), summed_dims(node.kwargs["equation"]) or 0) for node in joined)
