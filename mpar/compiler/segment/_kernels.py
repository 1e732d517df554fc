"""Choose kernels: every call of a primitive gets its implementation at compile time, so that it is the same on every rank."""

from collections import Counter

from torch import fx

from mpar.ir import KernelUse
from mpar.kernels import ARCHITECTURES, CATALOGUE, REFERENCE, REFERENCE_WORKSPACE, Kernels, choose
from mpar.ops import primitive_of
from mpar.sharding import bodies_of

__all__ = ["choose_kernels"]


def choose_kernels(graph: fx.Graph, kernels: Kernels) -> tuple[KernelUse, ...]:
    """Note on every call of a primitive which implementation runs it and how much workspace that takes; returns all choices."""
    uses: Counter[tuple[str, str, str]] = Counter()
    graphs = [graph, *(body.graph for body in bodies_of(graph))]
    for node in (node for g in graphs for node in g.nodes):
        primitive = primitive_of(node.target) if node.op == "call_function" else None
        if primitive is None or primitive.name not in CATALOGUE or kernels.arch not in ARCHITECTURES:
            continue
        operands, params = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        name, why = choose(kernels, primitive.name, operands, params)
        node.meta["implementation"] = name
        if name == REFERENCE and primitive.name in REFERENCE_WORKSPACE:
            node.meta["workspace"] = REFERENCE_WORKSPACE[primitive.name](*operands, **params)
        elif name != REFERENCE:
            node.meta["workspace"] = next(i for i in CATALOGUE[primitive.name] if i.name == name).workspace(*operands, **params)
        uses[primitive.name, name, why] += 1
    return tuple(KernelUse(*use, calls) for use, calls in uses.items())
