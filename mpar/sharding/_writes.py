"""Writes: what torch makes of a write into a tensor becomes ops that say which values the tensor has afterwards."""

import torch
from torch import fx

from mpar.sharding._canonicalise import call_like, shape_of
from mpar.sharding._pass import graph_pass

__all__ = ["replace_writes"]

aten = torch.ops.aten
EMPTY = (
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)
FILLED = {
    aten.copy.default: 1,
    aten.fill.Scalar: 1,
    aten.fill.Tensor: 1,
    aten.zero.default: None,
}
"""Ops that overwrite a whole tensor, and the number of the argument that they fill it with; None stands for 0."""


@graph_pass
def replace_writes(graph: fx.Graph) -> dict[str, int]:
    """Replace ops that write a whole tensor by the value that they write, and writes of one index by writes of a slice.

    What `empty` makes is zero, because ranks must agree on it.

    before:  %y = empty([4, 6]); %z = copy(%y, %x); %s = select_scatter(%z, %c, 0, 2)      # %x: [6], %c: [6]
    after:   %z = expand(%x, [4, 6]); %s = slice_scatter(%z, %c as [1, 6], 0, 2, 3)
    """
    replaced = 0
    for node in list(graph.nodes):
        with graph.inserting_before(node):
            if node.target in EMPTY:
                new = _full(graph, node, 0)
            elif node.target in FILLED:
                at = FILLED[node.target]
                new = _full(graph, node, 0 if at is None else node.args[at])
            elif node.target == aten.select_scatter.default:
                new = _one_wide(graph, node)
            else:
                continue
        node.replace_all_uses_with(new)
        replaced += 1
    return {"writes_replaced": replaced}


def _full(graph: fx.Graph, node: fx.Node, value: object) -> fx.Node:
    """A tensor like `node`, filled with a number or with a tensor that is broadcast."""
    shape, dtype = list(shape_of(node)), node.meta["val"].dtype
    if not isinstance(value, fx.Node):
        kwargs = {"dtype": dtype, "device": torch.device("cpu")}
        return call_like(graph, node, aten.full.default, (shape, value), kwargs)
    if value.meta["val"].dtype != dtype:
        value = call_like(graph, node, aten._to_copy.default, (value,), {"dtype": dtype})
    return value if list(shape_of(value)) == shape else call_like(graph, node, aten.expand.default, (value, shape))


def _one_wide(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A write into the one index `i` of a dim as a write into its slice from `i` to `i + 1`."""
    x, source, dim, index = node.args
    dim, index = dim % len(shape_of(x)), index % shape_of(x)[dim]
    wide = call_like(graph, node, aten.reshape.default, (source, [*shape_of(x)[:dim], 1, *shape_of(x)[dim + 1 :]]))
    return call_like(graph, node, aten.slice_scatter.default, (x, wide, dim, index, index + 1))
