"""What a graph pass is: a function from a graph to statistics, which leaves the graph well-formed."""

from collections.abc import Callable

from torch import fx

from mpar.ops import PRIMITIVES

__all__ = ["PASSES", "erase_dead_nodes", "graph_pass"]

GraphPass = Callable[[fx.Graph], dict[str, int]]
constrain_p = PRIMITIVES["constrain"]
PASSES: dict[str, GraphPass] = {}


def graph_pass(fn: GraphPass) -> GraphPass:
    """Register a pass under its name; dead nodes are removed and the graph is linted after it."""

    def run(graph: fx.Graph) -> dict[str, int]:
        statistics = fn(graph)
        erase_dead_nodes(graph)
        graph.lint()
        return statistics

    run.__name__, run.__doc__ = fn.__name__, fn.__doc__
    PASSES[fn.__name__] = run
    return run


def erase_dead_nodes(graph: fx.Graph) -> None:
    """Erase nodes that no result needs. A constraint stays even then: that of its cotangent refers to where its operand lives."""
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or node.target == constrain_p.op)
