"""Settle: in a traced graph the ops that stand for control flow become nodes that hold their bodies, without what nobody reads.

A gradient asks for more than its caller: for the carries that enter each turn, for gradients of everything that has floats. Of
that, results that nobody reads are taken out of the bodies, then carries on which nothing depends that is read, then operands.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from mpar.sharding._control import CONTROL, Cond, Flow, HasGraph, Scan
from mpar.sharding._control_op import Body, control_op
from mpar.sharding._pass import erase_dead_nodes

__all__ = ["settle"]


def settle(
    graph: fx.Graph, flows: Mapping[str, Flow[Body]], prepare: Callable[[fx.Graph], object], hold: Callable[[fx.Graph], HasGraph]
) -> None:
    """Replace each call of `mpar::control` by a node of the flow that its key stands for.

    prepare: the passes that have run on the graph, for the graphs of bodies.
    hold:    makes of the graph of a body what the node of its flow holds.
    """
    for node in reversed(graph.find_nodes(op="call_function", target=control_op)):
        if node.users:
            _settle_one(graph, node, flows, prepare, hold)
        else:
            graph.erase_node(node)
        erase_dead_nodes(graph)


def _settle_one(
    graph: fx.Graph,
    node: fx.Node,
    flows: Mapping[str, Flow[Body]],
    prepare: Callable[[fx.Graph], object],
    hold: Callable[[fx.Graph], HasGraph],
) -> None:
    flow = flows[node.kwargs["flow"]]
    bodies = {name: _copy(body) for name, body in flow.bodies.items()}
    for body in bodies.values():
        prepare(body.graph)
    flow, operands, results = _reduced(flow.with_bodies(**bodies), sorted({user.args[1] for user in node.users}))
    for body in flow.bodies.values():
        settle(body.graph, flows, prepare, hold)
    held: Flow[HasGraph] = flow.with_bodies(**{name: hold(body.graph) for name, body in flow.bodies.items()})
    with graph.inserting_before(node):
        new = graph.call_function(CONTROL[type(held)], ([node.args[0][i] for i in operands],), {"flow": held})
    new.meta = {"stack_trace": node.meta.get("stack_trace")}
    new.meta["val"] = tuple(torch.empty_like(node.meta["val"][i], device="meta") for i in results)
    for user in list(node.users):
        with graph.inserting_before(user):
            item = graph.call_function(operator.getitem, (new, results.index(user.args[1])))
        item.meta = dict(user.meta)
        user.replace_all_uses_with(item)
        graph.erase_node(user)
    graph.erase_node(node)


def _reduced(flow: Flow[Body], read: Sequence[int]) -> tuple[Flow[Body], list[int], list[int]]:
    """The flow with the results `read` and what they need, and the numbers of the operands and results that remain."""
    if isinstance(flow, Cond):
        needed = _needed(flow.if_true, read) | _needed(flow.if_false, read)
        kept = sorted(needed)
        return (
            flow.with_bodies(**{name: _part(body, kept, read) for name, body in flow.bodies.items()}),
            [0, *(1 + i for i in kept)],
            list(read),
        )
    num_carries, results = flow.num_carries, set(read)
    needed = set() if isinstance(flow, Scan) else _needed(flow.test, [0])
    while True:
        needed |= _needed(flow.body, results)
        carries = {i for i in needed if i < num_carries} | {i for i in results if i < num_carries}
        if carries <= results:
            break
        results |= carries
    operands, kept_results = sorted(needed | carries), sorted(results)
    body = _part(flow.body, operands, kept_results)
    if not isinstance(flow, Scan):
        return replace(flow, body=body, test=_part(flow.test, operands, [0]), num_carries=len(carries)), operands, kept_results
    first_sum = len(flow.body.results) - flow.num_sums
    return (
        replace(
            flow,
            body=body,
            num_carries=len(carries),
            num_xs=sum(num_carries <= i < num_carries + flow.num_xs for i in operands),
            num_sums=sum(i >= first_sum for i in kept_results),
        ),
        operands,
        kept_results,
    )


def _results(body: Body) -> Sequence[fx.Node]:
    return body.graph.output_node().args[0]  # type: ignore[return-value]


def _behind(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes and all that they are computed from."""
    found, todo = set(), list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found


def _needed(body: Body, results: Iterable[int]) -> set[int]:
    """The numbers of the operands from which these results are computed."""
    found = _behind(_results(body)[i] for i in results)
    return {i for i, node in enumerate(body.graph.find_nodes(op="placeholder")) if node in found}


def _copy(body: Body) -> Body:
    graph = fx.Graph()
    graph.output(graph.graph_copy(body.graph, {}))
    erase_dead_nodes(graph)
    return Body(graph)


def _part(body: Body, operands: Sequence[int], results: Sequence[int]) -> Body:
    """A copy of a body with these operands and results only."""
    wanted = [_results(body)[i] for i in results]
    found, placeholders = _behind(wanted), body.graph.find_nodes(op="placeholder")
    graph = fx.Graph()
    copies = {placeholders[i]: graph.node_copy(placeholders[i]) for i in operands}
    for node in body.graph.nodes:
        if node in found and node.op != "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in wanted))
    return Body(graph)
