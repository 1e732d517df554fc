"""Partition: one joint rank graph of a segment becomes its forward and its backward; the recompute policy says what crosses.

Parameters, the segment's input and the context are operands of both, so nothing computed from parameters or from context alone
needs to be kept. Views are never kept: their base is.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import networkx
import torch
from torch import Tensor, fx

from mpar.errors import ConfigError, UnknownNameError
from mpar.ops import primitive_of
from mpar.sharding import collectives

__all__ = [
    "CHEAP",
    "Halves",
    "RecomputePolicy",
    "computed_from",
    "descendants",
    "extract",
    "is_view",
    "names_of",
    "num_bytes",
    "partition",
    "policy",
    "producer",
    "reaching",
]

aten = torch.ops.aten
VIEWS = (
    aten.reshape.default,
    aten.permute.default,
    aten.expand.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.unsqueeze.default,
)
CHEAP = frozenset({"rms_norm", "layer_norm", "swiglu", "geglu", "pointwise", "cast"})
"""What `selective` computes again unless told otherwise: norms, activations, element-wise ops and casts."""


@dataclass(frozen=True)
class RecomputePolicy:
    """What backward computes again instead of keeping.

    kind:   none | full | selective | budget
    names:  for selective: primitives, collectives, labels of `ops.name`, and the classes "pointwise" and "cast".
    budget: for budget: bytes that one segment may keep on a rank.
    offload: what segments keep, their inputs too, waits for the backward in the memory of the host.
    """

    kind: str = "none"
    names: frozenset[str] = CHEAP
    budget: int = 0
    offload: bool = False


def policy(kind: str | None, names: Sequence[str] | None = None, budget: int = 0, *, offload: bool = False) -> RecomputePolicy:
    """A policy by name.

    Raises UnknownNameError for another kind than none, full, selective or budget, ConfigError for a negative budget.
    """
    kinds = ("none", "full", "selective", "budget")
    if kind is not None and kind not in kinds:
        raise UnknownNameError(f"no recompute policy is called {kind!r}; there are {', '.join(kinds)}")
    if budget < 0:
        raise ConfigError(f"a recompute budget of {budget} bytes: it must not be negative")
    return RecomputePolicy(kind or "none", CHEAP if names is None else frozenset(names), budget, offload)


@dataclass(frozen=True)
class Halves:
    """Forward: operands -> (its results, kept values). Backward: (operands that it reads, kept values, cotangents) -> gradients.

    `operands` lists, for the backward, which of the joint graph's placeholders it reads, by position; `kept` the joint graph's
    nodes that cross, in order.
    """

    forward: fx.Graph
    backward: fx.Graph
    operands: tuple[int, ...]
    kept: tuple[fx.Node, ...]


def partition(
    graph: fx.Graph, num_params: int, num_inputs: int, num_primals: int, num_results: int, recompute: RecomputePolicy
) -> Halves:
    """Cut a joint graph. Its placeholders are parameters, inputs, context (`num_primals` in all), then cotangents; its outputs
    are `num_results` results of the forward, then gradients.

    What only gradients need is left to the backward, even if it depends on no cotangent: keys that go round a second time.
    """
    placeholders = graph.find_nodes(op="placeholder")
    outputs = list(graph.output_node().args[0])
    results, gradients = outputs[:num_results], outputs[num_results:]
    cotangents = set(placeholders[num_primals:])
    early = _ancestors(results)
    late = descendants(graph, cotangents)
    late |= {node for node in graph.nodes if node.op == "call_function" and producer(node) not in early}
    free = computed_from(graph, set(placeholders[:num_params])) | computed_from(
        graph, set(placeholders[num_params + num_inputs : num_primals])
    )
    needed = _ancestors(gradients)
    crossing = [
        n for n in graph.nodes if n in needed and n not in late and n.op == "call_function" and _read_by(n, late, gradients)
    ]
    kept = _choose(graph, crossing, free, late, recompute)
    forward = extract(graph, placeholders[:num_primals], [*results, *kept], set(graph.nodes) - late)
    reachable = reaching(gradients, set(kept))
    read = tuple(i for i, node in enumerate(placeholders[:num_primals]) if node in reachable)
    backward = extract(graph, [*(placeholders[i] for i in read), *kept, *placeholders[num_primals:]], gradients, late)
    return Halves(forward, backward, read, tuple(kept))


def _choose(
    graph: fx.Graph, crossing: list[fx.Node], free: set[fx.Node], late: set[fx.Node], recompute: RecomputePolicy
) -> list[fx.Node]:
    if recompute.kind == "full":
        return []
    if recompute.kind == "budget":
        return _within_budget(graph, crossing, free, late, recompute.budget)
    names = recompute.names if recompute.kind == "selective" else frozenset()
    return _kept_under(graph, crossing, free, lambda node: bool(names_of(node) & names))


def _kept_under(graph: fx.Graph, crossing: list[fx.Node], free: set[fx.Node], again: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """What must be kept when nodes for which `again` holds, views and free nodes are computed again."""
    kept: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    todo = list(crossing)
    while todo:
        node = todo.pop()
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        if node in free or is_view(node) or not isinstance(node.meta["val"], Tensor) or again(node):
            todo.extend(node.all_input_nodes)
        else:
            kept.add(node)
    return [node for node in graph.nodes if node in kept]


def _within_budget(
    graph: fx.Graph, crossing: list[fx.Node], free: set[fx.Node], late: set[fx.Node], budget: int
) -> list[fx.Node]:
    """What to keep within `budget` bytes, found by letting ever more expensive nodes be computed again.

    Nodes are admitted in ascending FLOPs per byte of their result; for each prefix a minimum cut gives the fewest bytes to keep,
    and the first that fits is taken: least is computed again, though what is kept may stay well below the budget.
    """
    everything = _kept_under(graph, crossing, free, lambda node: False)
    if num_bytes(everything) <= budget:
        return everything
    forward = [
        n
        for n in graph.nodes
        if n.op == "call_function" and n not in late and n not in free and isinstance(n.meta["val"], Tensor) and not is_view(n)
    ]
    costs = {node: _flops(producer(node)) / max(num_bytes([node]), 1) for node in forward}
    for bound in sorted(set(costs.values())):
        kept = _minimum_cut(graph, crossing, free, {node for node in forward if costs[node] > bound})
        if num_bytes(kept) <= budget:
            return kept
    return []


def _minimum_cut(graph: fx.Graph, crossing: list[fx.Node], free: set[fx.Node], banned: set[fx.Node]) -> list[fx.Node]:
    """The nodes of least total bytes such that every crossing node follows from them without computing a banned one."""
    flow = networkx.DiGraph()
    flow.add_nodes_from(("source", "sink"))
    todo, seen = list(crossing), set()
    for node in crossing:
        if node not in free:
            flow.add_edge((node, "out"), "sink")
    while todo:
        node = todo.pop()
        if node in seen or node.op != "call_function" or node in free:
            continue
        seen.add(node)
        capacity = {} if is_view(node) or not isinstance(node.meta["val"], Tensor) else {"capacity": num_bytes([node])}
        flow.add_edge((node, "in"), (node, "out"), **capacity)
        if node in banned:
            flow.add_edge("source", (node, "in"))
        for used in node.all_input_nodes:
            if used.op == "call_function" and used not in free:
                flow.add_edge((used, "out"), (node, "in"))
                todo.append(used)
    _, (reachable, _) = networkx.minimum_cut(flow, "source", "sink")
    cut = {node for node in seen if (node, "in") in reachable and (node, "out") not in reachable}
    return [node for node in graph.nodes if node in cut]


def extract(graph: fx.Graph, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node], spine: set[fx.Node]) -> fx.Graph:
    """The part of `graph` that computes `outputs` from `inputs`: `spine` in its order, the rest just before first use."""
    out = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copy = out.placeholder(node.name)
        copy.meta = dict(node.meta)
        copies[node] = copy
    wanted = reaching(outputs, set(inputs))

    def build(node: fx.Node) -> fx.Node:
        stack = [node]
        while stack:
            top = stack[-1]
            if top in copies:
                stack.pop()
                continue
            missing = [used for used in top.all_input_nodes if used not in copies]
            if missing:
                stack.extend(reversed(missing))
                continue
            copies[stack.pop()] = out.node_copy(top, lambda n: copies[n])
        return copies[node]

    for node in graph.nodes:
        if node in wanted and node in spine:
            build(node)
    out.output(tuple(build(node) for node in outputs))
    out.lint()
    return out


def reaching(outputs: Sequence[fx.Node], stop: set[fx.Node]) -> set[fx.Node]:
    """All nodes from which `outputs` are computed when the values of `stop` are given; those of `stop` that are read included."""
    seen: set[fx.Node] = set()
    todo = list(outputs)
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            if node not in stop:
                todo.extend(node.all_input_nodes)
    return seen


def _ancestors(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    return reaching(nodes, set())


def descendants(graph: fx.Graph, roots: set[fx.Node]) -> set[fx.Node]:
    """`roots` and all nodes that are computed from any of them."""
    found = set(roots)
    for node in graph.nodes:
        if any(used in found for used in node.all_input_nodes):
            found.add(node)
    return found


def computed_from(graph: fx.Graph, roots: set[fx.Node]) -> set[fx.Node]:
    """Nodes computed from `roots` and constants alone."""
    found = set(roots)
    for node in graph.nodes:
        if node.op in ("call_function", "get_attr") and all(used in found for used in node.all_input_nodes):
            found.add(node)
    return found


def _read_by(node: fx.Node, late: set[fx.Node], gradients: Sequence[fx.Node]) -> bool:
    return node in gradients or any(user in late for user in node.users)


def is_view(node: fx.Node) -> bool:
    """Whether a node only looks at its operand's storage in another way; for an op with several results, its parts do."""
    made_by = producer(node)
    several = made_by is not node or not isinstance(node.meta.get("val"), Tensor)
    return node.target in VIEWS or node.target is collectives.shard or (several and getattr(made_by.target, "is_view", False))


def producer(node: fx.Node) -> fx.Node:
    """The op that makes a value: the op itself, or the op of whose results it is one."""
    return node.args[0] if node.target is operator.getitem else node


def names_of(node: fx.Node) -> frozenset[str]:
    """What a recompute policy may call a node: labels, its primitive or collective, "cast" or "pointwise"."""
    names = set(node.meta.get("labels", ()))
    node = producer(node)
    primitive = primitive_of(node.target)
    if primitive is not None:
        names.add(primitive.name)
    elif node.target in collectives.COLLECTIVES:
        names.add(node.target.__name__)
    elif node.target == aten._to_copy.default:
        names.add("cast")
    elif torch.Tag.pointwise in getattr(node.target, "tags", ()):
        names.add("pointwise")
    return frozenset(names)


def _flops(node: fx.Node) -> float:
    primitive = primitive_of(node.target)
    if primitive is None or primitive.cost is None:
        return 1e12 if node.target in collectives.COLLECTIVES else float(sum(num_bytes([n]) for n in node.all_input_nodes))
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return float(primitive.cost(*args, **kwargs).flops)


def num_bytes(nodes: Sequence[fx.Node]) -> int:
    """Bytes of the elements of the values of `nodes`, added."""
    return sum(value.nbytes for node in nodes for value in _tensors(node.meta["val"]))


def _tensors(value: Any) -> list[Tensor]:
    return (
        [value]
        if isinstance(value, Tensor)
        else [v for v in value if isinstance(v, Tensor)]
        if isinstance(value, (tuple, list))
        else []
    )
