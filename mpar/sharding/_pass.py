"""What a graph pass is: a function from a graph to statistics, which leaves the graph well-formed."""

from collections.abc import Callable

from torch import fx

__all__ = ["PASSES", "graph_pass"]

GraphPass = Callable[[fx.Graph], dict[str, int]]
PASSES: dict[str, GraphPass] = {}


def graph_pass(fn: GraphPass) -> GraphPass:
    """Register a pass under its name; dead nodes are removed and the graph is linted after it."""

    def run(graph: fx.Graph) -> dict[str, int]:
        statistics = fn(graph)
        graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
        graph.lint()
        return statistics

    run.__name__, run.__doc__ = fn.__name__, fn.__doc__
    PASSES[fn.__name__] = run
    return run
