"""Flatten late: a permute that moves flattened dims moves the dims themselves, and they are flattened after it.

The gradient of a product of batches of matrices flattens the dims of the batch, transposes the matrices, and unflattens. If one
of the flattened dims but the first is sharded, the flattened tensor cannot be, so it would be gathered.
"""

import torch
from torch import fx

from mpar.sharding._canonicalise import call_like, shape_of, view_groups
from mpar.sharding._pass import graph_pass

__all__ = ["flatten_late"]

aten = torch.ops.aten


@graph_pass
def flatten_late(graph: fx.Graph) -> dict[str, int]:
    """Let a permute that another view reads come before the reshape that flattens dims of its operand.

    before:  %a = reshape(%x, [6, 4, 5]); %b = permute(%a, [0, 2, 1]); %c = reshape(%b, [2, 3, 5, 4])      # %x: [2, 3, 4, 5]
    after:   %p = permute(%x, [0, 1, 3, 2]); %b = reshape(%p, [6, 5, 4]); %c = reshape(%b, [2, 3, 5, 4])
    """
    moved = 0
    for node in list(graph.nodes):
        if node.target != aten.permute.default or node.args[0].target != aten.reshape.default:
            continue
        if not any(user.target == aten.reshape.default for user in node.users):
            continue
        source = node.args[0].args[0]
        groups = view_groups(shape_of(source), shape_of(node.args[0]))
        if any(len(after) != 1 for _, after in groups):
            continue
        flattened = {after: before for before, (after,) in groups}
        order = [dim for place in node.args[1] for dim in flattened[place % len(flattened)]]
        with graph.inserting_before(node):
            permuted = call_like(graph, node, aten.permute.default, (source, order))
        node.target, node.args = aten.reshape.default, (permuted, list(shape_of(node)))
        moved += 1
    return {"flattens_moved": moved}
