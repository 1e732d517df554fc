"""Ragged: which values have as many rows as a router sends, and how many times the balanced number there may be."""

from typing import Any

from torch import Tensor, fx

from mpar.sharding import _collectives as collectives
from mpar.sharding._pass import graph_pass

__all__ = ["mark_ragged"]


@graph_pass
def mark_ragged(graph: fx.Graph) -> dict[str, int]:
    """Note `meta["ragged"]` of nodes with a ragged first dim: at most this many times the rows that the graph says.

    Rows that arrive are ragged: all ranks of the group may send all they have to one. So is what keeps their number.
    """
    for node in graph.nodes:
        if node.target is collectives.exchange_rows and node.kwargs["num_rows"] is None:
            node.meta["ragged"] = node.kwargs["size"]
        elif node.op == "call_function":
            rows = {
                (t.shape[0], used.meta["ragged"]) for used in node.all_input_nodes if "ragged" in used.meta for t in _rows(used)
            }
            most = max((times for size, times in rows if any(t.shape[0] == size for t in _rows(node))), default=0)
            if most:
                node.meta["ragged"] = most
    return {"ragged_values": sum("ragged" in node.meta for node in graph.nodes)}


def _rows(node: fx.Node) -> list[Tensor]:
    """The results of a node that have rows of features, not the numbers that describe them."""
    value: Any = node.meta["val"]
    values = value if isinstance(value, (list, tuple)) else [value]
    return [v for v in values if isinstance(v, Tensor) and v.ndim == 2 and v.is_floating_point()]
