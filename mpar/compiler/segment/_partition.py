"""Partition: cut the joint rank graph of a segment into its forward and its backward.

The backward needs values that the forward computes. The recompute policy decides which of them the forward keeps, and which the
backward computes again. Parameters, the segment's input and the context are operands of both, so values computed from parameters
or from context alone are called free and never kept. Instead of a view, the value of which it is a view is kept.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import networkx
import torch
from torch import Tensor, fx

from mpar.errors import ConfigError, UnknownNameError
from mpar.ops import PRIMITIVES, primitive_of
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
"""What the policy `selective` computes again by default: norms, activations, element-wise ops and casts."""


@dataclass(frozen=True)
class RecomputePolicy:
    """Which values a backward computes again instead of reading what its forward kept.

    kind:    none (keep all values that the backward needs), full (keep none), selective or budget.
    names:   for selective, what to compute again: primitives, collectives, labels of `ops.name`, and the classes "pointwise" and
             "cast".
    budget:  for budget, the bytes that one segment may keep on a rank.
    offload: whether kept values and the inputs of segments wait for the backward in the memory of the host.
    """

    kind: str = "none"
    names: frozenset[str] = CHEAP
    budget: int = 0
    offload: bool = False


def policy(kind: str | None, names: Sequence[str] | None = None, budget: int = 0, *, offload: bool = False) -> RecomputePolicy:
    """The policy of a kind; None is the same as "none". Without `names`, `selective` computes `CHEAP` again.

    Raises UnknownNameError for another kind than none, full, selective or budget, ConfigError for a negative budget.
    """
    kinds = ("none", "full", "selective", "budget")
    if kind is not None and kind not in kinds:
        raise UnknownNameError(f"no recompute policy is called {kind!r}; there are {', '.join(kinds)}")
    if budget < 0:
        raise ConfigError(f"a recompute budget of {budget} bytes: it must not be negative")
    return RecomputePolicy(kind or "none", CHEAP if names is None else frozenset(names), budget, offload)


def check_names(recompute: RecomputePolicy, graphs: Iterable[fx.Graph]) -> None:
    """Raise UnknownNameError if the policy selects by a name that is of no operation and no label in these graphs."""
    operations = {*PRIMITIVES, *(op.__name__ for op in collectives.COLLECTIVES), "cast", "pointwise"}
    unknown = recompute.names - operations - CHEAP if recompute.kind == "selective" else frozenset()
    if unknown:
        labels = {label for graph in graphs for node in graph.nodes for label in node.meta.get("labels", ())}
        if unknown := unknown - labels:
            raise UnknownNameError(
                f"recompute=selective is to compute {', '.join(sorted(unknown))} again, but nothing here has that name.\n"
                f"The labels of this model are {', '.join(sorted(labels))}.\n"
                "Primitives and collectives are selected by their names, other operations by pointwise and cast."
            )


@dataclass(frozen=True)
class Halves:
    """The two graphs that a joint graph is cut into.

    forward:  (parameters, x, context) -> (results, kept values).
    backward: (operands of the forward that it reads, kept values, cotangents) -> gradients.
    operands: which operands of the forward the backward reads, as indices.
    kept:     the nodes of the joint graph whose values are kept, in order.
    """

    forward: fx.Graph
    backward: fx.Graph
    operands: tuple[int, ...]
    kept: tuple[fx.Node, ...]


def partition(
    graph: fx.Graph, num_params: int, num_inputs: int, num_primals: int, num_results: int, recompute: RecomputePolicy
) -> Halves:
    """Cut a joint graph into forward and backward.

    Its placeholders are parameters, inputs and context, `num_primals` in all, then cotangents; its outputs are `num_results`
    results of the forward, then gradients. An op that only gradients need runs in the backward even if it reads no cotangent,
    such as the second exchange of keys in ring attention.
    """
    placeholders = graph.find_nodes(op="placeholder")
    outputs = list(graph.output_node().args[0])
    results, gradients = outputs[:num_results], outputs[num_results:]
    cotangents = set(placeholders[num_primals:])
    forward_nodes = _ancestors(results)
    backward_nodes = descendants(graph, cotangents)
    backward_nodes |= {node for node in graph.nodes if node.op == "call_function" and producer(node) not in forward_nodes}
    free = computed_from(graph, set(placeholders[:num_params])) | computed_from(
        graph, set(placeholders[num_params + num_inputs : num_primals])
    )
    needed = _ancestors(gradients)
    crossing = [
        n
        for n in graph.nodes
        if n in needed
        and n not in backward_nodes
        and n.op == "call_function"
        and _is_read_by_backward(n, backward_nodes, gradients)
    ]
    kept = _choose(graph, crossing, free, backward_nodes, recompute)
    forward = extract(graph, placeholders[:num_primals], [*results, *kept], set(graph.nodes) - backward_nodes)
    reachable = reaching(gradients, set(kept))
    operands_read = tuple(i for i, node in enumerate(placeholders[:num_primals]) if node in reachable)
    backward = extract(
        graph, [*(placeholders[i] for i in operands_read), *kept, *placeholders[num_primals:]], gradients, backward_nodes
    )
    return Halves(forward, backward, operands_read, tuple(kept))


def _choose(
    graph: fx.Graph, crossing: list[fx.Node], free: set[fx.Node], backward_nodes: set[fx.Node], recompute: RecomputePolicy
) -> list[fx.Node]:
    """The nodes to keep under a policy. `crossing`: nodes of the forward that the backward reads."""
    if recompute.kind == "full":
        return []
    if recompute.kind == "budget":
        return _within_budget(graph, crossing, free, backward_nodes, recompute.budget)
    names = recompute.names if recompute.kind == "selective" else frozenset()
    return _kept_under(graph, crossing, free, lambda node: bool(names_of(node) & names))


def _kept_under(
    graph: fx.Graph, crossing: list[fx.Node], free: set[fx.Node], is_recomputed: Callable[[fx.Node], bool]
) -> list[fx.Node]:
    """The nodes to keep if the backward computes views, free nodes and nodes for which `is_recomputed` holds again."""
    kept: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    todo = list(crossing)
    while todo:
        node = todo.pop()
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        if node in free or is_view(node) or not isinstance(node.meta["val"], Tensor) or is_recomputed(node):
            todo.extend(node.all_input_nodes)
        else:
            kept.add(node)
    return [node for node in graph.nodes if node in kept]


def _within_budget(
    graph: fx.Graph, crossing: list[fx.Node], free: set[fx.Node], backward_nodes: set[fx.Node], budget: int
) -> list[fx.Node]:
    """The nodes to keep within `budget` bytes.

    If not all of them fit, the backward may compute a node again if that takes at most `bound` FLOPs per byte of its result. The
    bound is raised from one node's cost to the next: for each, a minimum cut gives the fewest bytes that must be kept, and the
    first cut within the budget is taken. So only the cheapest nodes are computed again, but the kept bytes may stay well below
    the budget.
    """
    everything = _kept_under(graph, crossing, free, lambda node: False)
    if num_bytes(everything) <= budget:
        return everything
    forward = [
        n
        for n in graph.nodes
        if n.op == "call_function"
        and n not in backward_nodes
        and n not in free
        and isinstance(n.meta["val"], Tensor)
        and not is_view(n)
    ]
    costs = {node: _flops(producer(node)) / max(num_bytes([node]), 1) for node in forward}
    for bound in sorted(set(costs.values())):
        kept = _minimum_cut(graph, crossing, free, {node for node in forward if costs[node] > bound})
        if num_bytes(kept) <= budget:
            return kept
    return []


def _minimum_cut(graph: fx.Graph, crossing: list[fx.Node], free: set[fx.Node], banned: set[fx.Node]) -> list[fx.Node]:
    """The set of nodes with the fewest bytes from which every crossing node can be computed without computing a banned node."""
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
    chosen = {node for node in seen if (node, "in") in reachable and (node, "out") not in reachable}
    return [node for node in graph.nodes if node in chosen]


def extract(graph: fx.Graph, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node], spine: set[fx.Node]) -> fx.Graph:
    """A new graph that computes `outputs` from `inputs` as `graph` does.

    Nodes in `spine` keep their order; each other node comes right before the first node that reads it.
    """
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
    """The nodes from which `outputs` are computed, `outputs` included; the search goes up to the nodes in `stop`, not beyond."""
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
    """`roots` and all nodes that are computed from them and constants alone."""
    found = set(roots)
    for node in graph.nodes:
        if node.op in ("call_function", "get_attr") and all(used in found for used in node.all_input_nodes):
            found.add(node)
    return found


def _is_read_by_backward(node: fx.Node, backward_nodes: set[fx.Node], gradients: Sequence[fx.Node]) -> bool:
    """Whether the backward reads a node, or returns it as a gradient."""
    return node in gradients or any(user in backward_nodes for user in node.users)


def is_view(node: fx.Node) -> bool:
    """Whether the value of a node lies in the storage of its operand. For an op with several results, torch says if all do."""
    made_by = producer(node)
    several = made_by is not node or not isinstance(node.meta.get("val"), Tensor)
    return node.target in VIEWS or node.target is collectives.shard or (several and getattr(made_by.target, "is_view", False))


def producer(node: fx.Node) -> fx.Node:
    """The node of the op that makes the value of `node`: `node` itself, unless it takes one of several results from that op."""
    return node.args[0] if node.target is operator.getitem else node


def names_of(node: fx.Node) -> frozenset[str]:
    """The names by which a recompute policy may select a node: labels, its primitive or collective, "cast" or "pointwise"."""
    names = set(node.meta.get("labels", ()))
    node = producer(node)
    primitive = primitive_of(node.target)
    if primitive is not None:
        names.add(primitive.name)
        names |= {"einsum"} if primitive.name == "einsum_add" else set()
    elif node.target in collectives.COLLECTIVES:
        names.add(node.target.__name__)
    elif node.target == aten._to_copy.default:
        names.add("cast")
    elif torch.Tag.pointwise in getattr(node.target, "tags", ()):
        names.add("pointwise")
    return frozenset(names)


def _flops(node: fx.Node) -> float:
    """FLOPs of an op for the policy `budget`. An op without a rule for its cost counts the bytes of its operands; a collective
    counts 1e12, so that it is computed again last."""
    primitive = primitive_of(node.target)
    if primitive is None or primitive.cost is None:
        return 1e12 if node.target in collectives.COLLECTIVES else float(sum(num_bytes([n]) for n in node.all_input_nodes))
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return float(primitive.cost(*args, **kwargs).flops)


def num_bytes(nodes: Sequence[fx.Node]) -> int:
    """The sum of the sizes in bytes of the values of `nodes`."""
    return sum(value.nbytes for node in nodes for value in _tensors(node.meta["val"]))


def _tensors(value: Any) -> list[Tensor]:
    return (
        [value]
        if isinstance(value, Tensor)
        else [v for v in value if isinstance(v, Tensor)]
        if isinstance(value, (tuple, list))
        else []
    )
