"""Permute late: values that are permuted alike are joined first, because a copy that does not permute reads whole lines.

A model that cuts one product into queries, keys and values joins their gradients, which attention gives by positions and the cut
wants by heads. Joined as they lie, they are copied once, and the products that read them absorb the permute.
"""

import torch
from torch import fx

from mpar.sharding._canonicalise import call_like, shape_of
from mpar.sharding._pass import graph_pass

__all__ = ["permute_late"]

aten = torch.ops.aten


@graph_pass
def permute_late(graph: fx.Graph) -> dict[str, int]:
    """Move permutes behind a cat whose operands all have the same one.

    before:  %c = cat([permute(%x, [0, 2, 1]), permute(%y, [0, 2, 1])], 2)
    after:   %j = cat([%x, %y], 1); %c = permute(%j, [0, 2, 1])
    """
    moved = 0
    for node in [node for node in graph.nodes if node.target == aten.cat.default]:
        operands = node.args[0]
        if any(operand.target != aten.permute.default for operand in operands):
            continue
        rank = len(shape_of(node))
        orders = {tuple(dim % rank for dim in operand.args[1]) for operand in operands}
        if len(orders) > 1:
            continue
        (order,) = orders
        dim = node.args[1] if len(node.args) > 1 else 0
        with graph.inserting_before(node):
            joined = call_like(graph, node, aten.cat.default, ([operand.args[0] for operand in operands], order[dim]))
            permuted = call_like(graph, node, aten.permute.default, (joined, list(order)))
        permuted.meta["labels"] = node.meta.get("labels", ())
        node.replace_all_uses_with(permuted)
        graph.erase_node(node)
        moved += 1
    return {"permutes_moved": moved}
