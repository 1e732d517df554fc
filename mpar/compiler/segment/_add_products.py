"""Add products: a sum of a product and something else becomes one op, which adds what it multiplies.

Gradients of a value that several products read are such sums, and so is what an adapter adds. BLAS does it at the cost of the
product alone. A sum is then rounded once where it was rounded twice, so this happens before a segment is cut: its forward, its
backward and what is computed again have the same bits.
"""

import torch
from torch import Tensor, fx

from mpar.ops import PRIMITIVES
from mpar.sharding import collectives, graph_pass, is_heavy

__all__ = ["add_products"]

EINSUM, EINSUM_ADD = PRIMITIVES["einsum"].op, PRIMITIVES["einsum_add"].op


@graph_pass
def add_products(graph: fx.Graph) -> dict[str, int]:
    """Join a product with the sum that is its one reader, if the other term was there before and has no other reader either.

    before:  %a = einsum(%x, %v); %b = einsum(%y, %w); %s = add(%a, %b)
    after:   %a = einsum(%x, %v); %s = einsum_add(%a, %y, %w)

    A term that others read stays as it is: the sum could not be written over it. So does one that may be waiting for a message,
    which the product can hide.
    """
    place = {node: index for index, node in enumerate(graph.nodes)}
    joined = 0
    for node in list(graph.nodes):
        if node.target != torch.ops.aten.add.Tensor or node.kwargs or not all(_is_term(term, node) for term in node.args):
            continue
        first, second = sorted(node.args, key=place.__getitem__)
        if second.target == EINSUM and not _may_wait(first):
            with graph.inserting_before(node):
                total = graph.call_function(EINSUM_ADD, (first, *second.args), second.kwargs)
            total.meta = dict(node.meta)
            place[total] = place[node]
            node.replace_all_uses_with(total)
            graph.erase_node(node)
            joined += 1
    return {"products_added": joined}


def _is_term(term: object, total: fx.Node) -> bool:
    """Whether nothing else reads a term, and its value is like the sum."""
    if not isinstance(term, fx.Node) or term.op != "call_function" or list(term.users) != [total]:
        return False
    value, result = term.meta["val"], total.meta["val"]
    if not isinstance(value, Tensor) or total.args[0] is total.args[1]:
        return False
    return (value.shape, value.dtype) == (result.shape, result.dtype) and value.is_contiguous() and result.is_contiguous()


def _may_wait(term: fx.Node) -> bool:
    """Whether there is no product between a message and the term."""
    todo, seen = [term], set()
    while todo:
        node = todo.pop()
        if node.target in collectives.COLLECTIVES:
            return True
        if node not in seen and not is_heavy(node):
            seen.add(node)
            todo.extend(node.all_input_nodes)
    return False
