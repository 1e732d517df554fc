"""Ragged: which values have as many rows as a router sends, and how many times the balanced number there may be."""

from typing import Any

from torch import Tensor, fx

from mpar.ops import primitive_of
from mpar.sharding import _collectives as collectives
from mpar.sharding._pass import graph_pass

__all__ = ["mark_ragged"]


@graph_pass
def mark_ragged(graph: fx.Graph) -> dict[str, int]:
    """Note `meta["ragged"]` of nodes with a ragged first dim: at most this many times the rows that the graph says.

    Rows that arrive are ragged: all ranks of the group may send all they have to one. So are those that a rank takes of slots
    which all ranks have, and what keeps their number.
    """
    for node in graph.nodes:
        if node.target is collectives.exchange_rows:
            if node.kwargs["num_rows"] is None:
                node.meta["ragged"] = node.kwargs["size"] * node.args[0][0].meta.get("ragged", 1)
        elif (primitive := primitive_of(node.target)) is not None and primitive.name in ("take_rows", "head_rows"):
            node.meta["ragged"] = _slots(node) // node.kwargs["num_rows"]
        elif node.op == "call_function" and not (primitive is not None and primitive.name == "pad_rows"):
            rows = {
                (t.shape[0], used.meta["ragged"]) for used in node.all_input_nodes if "ragged" in used.meta for t in _rows(used)
            }
            most = max((times for size, times in rows if any(t.shape[0] == size for t in _rows(node))), default=0)
            if most:
                node.meta["ragged"] = most
    return {"ragged_values": sum("ragged" in node.meta for node in graph.nodes)}


def _slots(node: fx.Node) -> int:
    """Rows from which an op takes some."""
    return node.args[1 if len(node.args) == 3 else 0].meta["val"].shape[0]


def _rows(node: fx.Node) -> list[Tensor]:
    """The results of a node that have rows of features, not the numbers that describe them."""
    value: Any = node.meta["val"]
    values = value if isinstance(value, (list, tuple)) else [value]
    return [v for v in values if isinstance(v, Tensor) and v.ndim == 2 and v.is_floating_point()]
