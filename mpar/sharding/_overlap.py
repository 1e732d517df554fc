"""Overlap: ops that do not need a posted message run while it is on its way."""

from torch import fx

from mpar.ops import primitive_of
from mpar.sharding import _collectives as collectives
from mpar.sharding._pass import graph_pass

__all__ = ["is_heavy", "overlap_posted"]

PRODUCTS = ("einsum", "einsum_add", "attention", "grouped_matmul", "mlp_tiled")


@graph_pass
def overlap_posted(graph: fx.Graph) -> dict[str, int]:
    """Post messages as soon as their values are computed, and wait for them as late as other work allows.

    For the second part, the ops behind a wait that do not depend on it are moved in front of it. The search for such ops ends at
    the first product or collective that does depend on it. Nothing is moved unless a product is among them.

    before:  %p = exchange_rows(%x); %a = arrived(%p); %s = einsum(shared expert); %g = grouped_matmul(%a)
    after:   %p = exchange_rows(%x); %s = einsum(shared expert); %a = arrived(%p); %g = grouped_matmul(%a)
    """
    moved = 0
    for post in [node for node in graph.nodes if node.target in collectives.POSTED]:
        order = {node: index for index, node in enumerate(graph.nodes)}
        last = max(post.all_input_nodes, key=order.__getitem__)
        if last.op == "placeholder":
            last = graph.find_nodes(op="placeholder")[-1]
        if last.next is not post:
            last.append(post)
            moved += 1
    for arrival in [node for node in graph.nodes if node.target is collectives.arrived]:
        waiting, independent = {arrival}, []
        node = arrival.next
        while node.op != "output":
            if any(used in waiting for used in node.all_input_nodes):
                waiting.add(node)
                if is_heavy(node) or node.target in collectives.COLLECTIVES:
                    break
            else:
                independent.append(node)
            node = node.next
        if not any(is_heavy(other) for other in independent):
            continue  # too little work to be worth the memory of computing it early
        for other in independent:
            arrival.prepend(other)
        moved += len(independent)
    return {"nodes_moved": moved}


def is_heavy(node: fx.Node) -> bool:
    """Whether a node multiplies matrices."""
    primitive = primitive_of(node.target)
    return primitive is not None and primitive.name.removesuffix("_bwd").removesuffix("_dw") in PRODUCTS
