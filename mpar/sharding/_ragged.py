"""Ragged: which values have a number of rows that a router decides, and by how much it may exceed the balanced number."""

from typing import Any

from torch import Tensor, fx

from mpar.ops import primitive_of
from mpar.sharding import _collectives as collectives
from mpar.sharding._pass import graph_pass

__all__ = ["mark_ragged"]


@graph_pass
def mark_ragged(graph: fx.Graph) -> dict[str, int]:
    """Set `meta["ragged"]` of nodes with a ragged first dim: they may have at most so many times the rows that their shape says.

    Rows that arrive from other ranks are ragged, because all ranks of the group may send all their rows to one. So are the rows
    that a rank takes of slots which all ranks have. An op that keeps the number of rows passes the mark on.
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
            max_times = max((times for size, times in rows if any(t.shape[0] == size for t in _rows(node))), default=0)
            if max_times:
                node.meta["ragged"] = max_times
    return {"ragged_values": sum("ragged" in node.meta for node in graph.nodes)}


def _slots(node: fx.Node) -> int:
    """The number of rows of which an op takes some."""
    return node.args[1 if len(node.args) == 3 else 0].meta["val"].shape[0]


def _rows(node: fx.Node) -> list[Tensor]:
    """The results of a node that hold rows of features; counts and indices are left out."""
    value: Any = node.meta["val"]
    values = value if isinstance(value, (list, tuple)) else [value]
    return [v for v in values if isinstance(v, Tensor) and v.ndim == 2 and v.is_floating_point()]
