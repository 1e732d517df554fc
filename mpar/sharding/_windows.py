"""Windows: slices, their gradients and pads along a dim, two in a row, become one pad if together they keep the size.

A shift by one position is written as `pad(x, (1, 0))[:-1]`, or the other way round. Between the two the dim has a size that no
mesh axis divides; together they are a move of every row to the next place, for which shards exchange their borders.
"""

from dataclasses import dataclass

import torch
from torch import fx

from mpar.sharding._canonicalise import call_like, labels_of, shape_of
from mpar.sharding._pass import graph_pass

__all__ = ["join_windows", "window_of"]

aten = torch.ops.aten


@dataclass(frozen=True)
class _Window:
    """Rows that are added (positive) or cut off (negative) before and after those of `source` along `dim`.

    Elements of added rows are `value`.
    """

    source: fx.Node
    dim: int
    before: int
    after: int
    value: float = 0.0


@graph_pass
def join_windows(graph: fx.Graph) -> dict[str, int]:
    """Join two windows along the same dim if together they keep its size.

    before:  %a = constant_pad_nd(%x, [1, 0]); %y = slice(%a, 0, 0, 8)       # %x: [8]
    after:   %y = constant_pad_nd(%x, [1, -1])
    """
    joined = 0
    for node in list(graph.nodes):
        outer = window_of(node)
        inner = None if outer is None else window_of(outer.source)
        if outer is None or inner is None or inner.dim != outer.dim or not _join(inner, outer):
            continue
        before, after = inner.before + outer.before, inner.after + outer.after
        if before + after:
            continue
        value = inner.value if max(inner.before, inner.after) > 0 else outer.value
        last = len(shape_of(node)) - 1 - inner.dim
        with graph.inserting_before(node):
            pad = call_like(graph, node, aten.constant_pad_nd.default, (inner.source, [0, 0] * last + [before, after], value))
        pad.meta["labels"] = labels_of(node)
        node.replace_all_uses_with(pad)
        joined += 1
    return {"windows_joined": joined}


def window_of(node: fx.Node) -> _Window | None:
    """What a node does to its operand if it is a window along one dim."""
    if node.target == aten.cat.default:
        return _beside_a_constant(node)
    if node.target not in (aten.slice.Tensor, aten.slice_backward.default, aten.constant_pad_nd.default):
        return None
    source = node.args[0]
    if node.target == aten.constant_pad_nd.default:
        pad, value = node.args[1], node.args[2] if len(node.args) > 2 else 0
        sides = [(i, pad[2 * i], pad[2 * i + 1]) for i in range(len(pad) // 2) if pad[2 * i] or pad[2 * i + 1]]
        return _Window(source, len(shape_of(node)) - 1 - sides[0][0], *sides[0][1:], value) if len(sides) == 1 else None
    if node.target == aten.slice.Tensor:
        given = list(node.args[1:])
        dim, start, end, step = given + [0, None, None, 1][len(given) :]
        whole, sign = shape_of(source), -1
    else:
        _, _, dim, start, end, step = node.args
        whole, sign = shape_of(node), 1
    dim %= len(whole)
    first, last, _ = slice(start, end).indices(whole[dim])
    return _Window(source, dim, sign * first, sign * (whole[dim] - last)) if step == 1 and first <= last else None


def _beside_a_constant(node: fx.Node) -> _Window | None:
    """The window of a concatenation of one tensor and one that is filled with a number."""
    parts, dim = list(node.args[0]), node.args[1] if len(node.args) > 1 else 0
    filled = [
        i for i, part in enumerate(parts) if part.target == aten.expand.default and part.args[0].target == aten.full.default
    ]
    if len(parts) != 2 or len(filled) != 1:
        return None
    constant, source = parts[filled[0]], parts[1 - filled[0]]
    dim %= len(shape_of(node))
    rows = shape_of(constant)[dim]
    return _Window(source, dim, *((0, rows) if filled[0] else (rows, 0)), constant.args[0].args[1])


def _join(inner: _Window, outer: _Window) -> bool:
    """Whether one window does the same: none adds rows where the other has cut some off, and what both add is equal."""
    sides = ((inner.before, outer.before), (inner.after, outer.after))
    adds = [any(side > 0 for side in (window.before, window.after)) for window in (inner, outer)]
    return not any(first < 0 < second for first, second in sides) and (not all(adds) or inner.value == outer.value)
