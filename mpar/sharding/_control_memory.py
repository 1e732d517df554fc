"""Memory of control flow: the bytes that a rank holds, besides operands and results, while the functions of `mpar.control` run.

These hold operands to the end. The carries of the turn before belong to the body, which frees each after its last use.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from mpar.sharding._control import CONTROL, Cond, Flow, Scan
from mpar.torch_private import storage_key

__all__ = ["flow_workspace", "held_inside"]


def held_inside(node: fx.Node) -> int:
    """For a node of control flow, the most bytes of values in its bodies that are held at once; 0 for other nodes."""
    return flow_workspace(node.kwargs["flow"], held_inside) if node.target in CONTROL.values() else 0


def flow_workspace(flow: Flow, workspace: Callable[[fx.Node], int]) -> int:
    """The most bytes held at once, less those of the results; `workspace(node)` is what an op in a body allocates and frees."""
    if isinstance(flow, Cond):
        return max(_peak(body.graph, 0, workspace) - _bytes(_results(body.graph)) for body in flow.bodies.values())
    results, nc = _results(flow.body.graph), flow.num_carries
    carried, later = _bytes(results[:nc]), _peak(flow.body.graph, nc, workspace)
    if not isinstance(flow, Scan):
        return max(carried + _peak(flow.test.graph, 0, workspace), later) - carried
    _, ys, sums = flow.parts(results)
    stacks, added = flow.length * sum(y.nbytes for y in ys), _bytes(sums)
    again = later if flow.length > 1 else 0
    first = max(_peak(flow.body.graph, 0, workspace), _bytes(results) + stacks)
    return max(first, again + stacks + added, (_bytes(results) + stacks + added) if again else 0) - (carried + stacks + added)


def _results(graph: fx.Graph) -> list[Tensor]:
    return [node.meta["val"] for node in graph.output_node().args[0]]


def _bytes(values: list[Tensor]) -> int:
    """The bytes of the storages of some tensors."""
    return sum({storage_key(value): value.untyped_storage().nbytes() for value in values}.values())


def _peak(graph: fx.Graph, num_owned: int, workspace: Callable[[fx.Node], int]) -> int:
    """The most bytes that a body holds at once: of its operands only the first `num_owned`, until nothing reads them any more."""
    given = graph.find_nodes(op="placeholder")
    calls = [node for node in graph.nodes if node.op == "call_function"]
    last: dict[int, fx.Node] = {}
    for node in (*given, *calls, graph.output_node()):
        for used in node.all_input_nodes if node.op == "output" else (node, *node.all_input_nodes):
            last |= dict.fromkeys(_storages(used), node)
    foreign = {key for node in given[num_owned:] for key in _storages(node)}
    held = {key: size for node in given[:num_owned] for key, size in _storages(node).items() if last[key] is not node}
    peak = sum(held.values())
    for node in calls:
        held |= {key: size for key, size in _storages(node).items() if key not in foreign}
        peak = max(peak, sum(held.values()) + workspace(node))
        held = {key: size for key, size in held.items() if last[key] is not node}
    return peak


def _storages(node: fx.Node) -> dict[int, int]:
    """The storages of the value of a node, with their bytes."""
    value: Any = node.meta["val"]
    values = value if isinstance(value, (list, tuple)) else (value,)
    return {storage_key(x): x.untyped_storage().nbytes() for x in values if isinstance(x, Tensor)}
