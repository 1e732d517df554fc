"""Split indices: ops that read rows by a flattened index, or add to them, take the index as it was before.

Sequences of ids are often flattened for one look-up, or for one sum by segments. A flattened dim cannot be sharded as its second
part is, so the lowering would gather it.
"""

import math
from dataclasses import dataclass

import torch
from torch import fx

from mpar.sharding._canonicalise import call_like, labels_of, shape_of
from mpar.sharding._pass import graph_pass

__all__ = ["split_indices"]

aten = torch.ops.aten


@dataclass(frozen=True)
class _Rows:
    """Rows of a tensor along `dim` that an index with one dim names. `values` are added to them; None if they are read."""

    dim: int
    index: fx.Node
    values: fx.Node | None = None


@graph_pass
def split_indices(graph: fx.Graph) -> dict[str, int]:
    """Let an op read an index whose dims a view merges, and the values to add, before the view.

    before:  %i = reshape(%ids, [6]); %y = index_select(%x, 0, %i)                        # %ids: [2, 3], %x: [8, 4]
    after:   %r = index(%x, [%ids]); %y = reshape(%r, [6, 4])

    before:  %i = reshape(%ids, [6]); %v = reshape(%u, [6, 4]); %y = index_add(%x, 0, %i, %v)
    after:   %y = index_put(%x, [%ids], %u, accumulate=True)
    """
    split = 0
    for node in list(graph.nodes):
        rows = _rows(node)
        if rows is None or rows.index.target != aten.reshape.default:
            continue
        ids = rows.index.args[0]
        if sum(n > 1 for n in shape_of(ids)) < 2:
            continue
        indices = [*[None] * rows.dim, ids]
        with graph.inserting_before(node):
            if rows.values is None:
                chosen = call_like(graph, node, aten.index.Tensor, (node.args[0], indices))
                result = call_like(graph, node, aten.reshape.default, (chosen, list(shape_of(node))))
            elif (values := _before_view(graph, rows.values, rows.dim, shape_of(ids))) is not None:
                result = call_like(graph, node, aten.index_put.default, (node.args[0], indices, values, True))
            else:
                continue
        result.meta["labels"] = labels_of(node)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        split += 1
    return {"indices_split": split}


def _rows(node: fx.Node) -> _Rows | None:
    """What a node reads, or what it adds to, if its index has one dim."""
    args = node.args
    found: _Rows | None
    if node.target == aten.index_select.default:
        found = _Rows(args[1], args[2])
    elif node.target == aten.index_add.default and node.kwargs.get("alpha", 1) == 1:
        found = _Rows(args[1], args[2], args[3])
    elif node.target == aten.scatter_add.default and shape_of(args[0]) and shape_of(args[2]) == shape_of(args[3]):
        found = _Rows(args[1], args[2], args[3]) if len(shape_of(args[0])) == 1 else None
    elif node.target in (aten.index.Tensor, aten.index_put.default):
        found = _indexed(node)
    else:
        return None
    if found is None or len(shape_of(found.index)) != 1:
        return None
    ndim = len(shape_of(args[0]))
    whole = found.values is None or len(shape_of(found.values)) == ndim
    return _Rows(found.dim % ndim, found.index, found.values) if whole else None


def _indexed(node: fx.Node) -> _Rows | None:
    """What a node reads, or what it adds to, if only one dim is indexed, by integers, and no value is broadcast."""
    given = [(dim, index) for dim, index in enumerate(node.args[1]) if index is not None]
    if len(given) != 1 or not given[0][1].meta["val"].dtype.is_signed or len(shape_of(given[0][1])) != 1:
        return None
    dim, index = given[0]
    if node.target == aten.index.Tensor:
        return _Rows(dim, index)
    shape, values = list(shape_of(node.args[0])), node.args[2]
    shape[dim] = shape_of(index)[0]
    adds = len(node.args) > 3 and node.args[3] and list(shape_of(values)) == shape
    return _Rows(dim, index, values) if adds else None


def _before_view(graph: fx.Graph, values: fx.Node, dim: int, entries: tuple[int, ...]) -> fx.Node | None:
    """Values with a dim for each one of the index: what a view merged dims of, or one number that is expanded."""
    shape = [*shape_of(values)[:dim], *entries, *shape_of(values)[dim + 1 :]]
    if values.target == aten.reshape.default and list(shape_of(values.args[0])) == shape:
        return values.args[0]
    if values.target == aten.expand.default and math.prod(shape_of(values.args[0])) == 1:
        return call_like(graph, values, aten.expand.default, (values.args[0], shape))
    return None
