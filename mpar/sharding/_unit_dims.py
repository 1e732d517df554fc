"""Unit dims: dims of size 1 are inserted after a permute instead of before it.

torch.einsum gives its operands such dims, permutes them, and merges dims into those of a product of matrices. Without unit dims
in between, the product is read as an einsum of the tensors themselves, in which every dim may be sharded.
"""

import torch
from torch import fx

from mpar.sharding._canonicalise import call_like, labels_of, shape_of
from mpar.sharding._pass import graph_pass

__all__ = ["insert_unit_dims_late"]

aten = torch.ops.aten


@graph_pass
def insert_unit_dims_late(graph: fx.Graph) -> dict[str, int]:
    """Let a permute move the dims that a view has besides dims of size 1; a view inserts these after it.

    before:  %a = reshape(%x, [2, 3, 1]); %b = permute(%a, [2, 1, 0])      # %x: [2, 3]
    after:   %p = permute(%x, [1, 0]); %b = reshape(%p, [1, 3, 2])
    """
    moved = 0
    for node in list(graph.nodes):
        if node.target != aten.permute.default or node.args[0].target != aten.reshape.default:
            continue
        view = node.args[0]
        sizes = shape_of(view)
        kept = [dim for dim, size in enumerate(sizes) if size != 1]
        if len(kept) == len(sizes):
            continue
        order = [kept.index(dim % len(sizes)) for dim in node.args[1] if dim % len(sizes) in kept]
        with graph.inserting_before(node):
            narrow = call_like(graph, view, aten.reshape.default, (view.args[0], [sizes[dim] for dim in kept]))
            permuted = call_like(graph, node, aten.permute.default, (narrow, order))
            wide = call_like(graph, node, aten.reshape.default, (permuted, list(shape_of(node))))
        wide.meta["labels"] = labels_of(node)
        node.replace_all_uses_with(wide)
        moved += 1
    return {"unit_dims_moved": moved}
