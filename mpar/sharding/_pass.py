"""Graph passes: functions that rewrite a graph and return statistics of what they changed."""

from collections.abc import Callable

from torch import fx

from mpar.ops import PRIMITIVES

__all__ = ["PASSES", "erase_dead_nodes", "graph_pass"]

GraphPass = Callable[[fx.Graph], dict[str, int]]
constrain_p = PRIMITIVES["constrain"]
PASSES: dict[str, GraphPass] = {}


def graph_pass(fn: GraphPass) -> GraphPass:
    """Register a pass under its name, and let it erase dead nodes and check that the graph is well-formed at its end."""

    def run(graph: fx.Graph) -> dict[str, int]:
        statistics = fn(graph)
        erase_dead_nodes(graph)
        graph.lint()
        return statistics

    run.__name__, run.__doc__ = fn.__name__, fn.__doc__
    PASSES[fn.__name__] = run
    return run


def erase_dead_nodes(graph: fx.Graph) -> None:
    """Erase nodes that no result needs, but no `constrain`: the mark of its cotangent refers to the spec of its operand."""
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or node.target == constrain_p.op)
