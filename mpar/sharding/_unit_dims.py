"""Unit dims: dims of size 1 are inserted after a permute or a product instead of before it.

torch.einsum gives its operands such dims, permutes them, and merges dims into those of a product of matrices. Without unit dims
in between, the product is read as an einsum of the tensors themselves, in which every dim may be sharded.
"""

import torch
from torch import fx

from mpar.ops import PRIMITIVES
from mpar.sharding._canonicalise import call_like, labels_of, shape_of
from mpar.sharding._pass import graph_pass

__all__ = ["drop_unit_letters", "insert_unit_dims_late"]

aten = torch.ops.aten
einsum_p = PRIMITIVES["einsum"]


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


@graph_pass
def drop_unit_letters(graph: fx.Graph) -> dict[str, int]:
    """Let an einsum read its operands without the dims of size 1 that views gave them; a view gives them to its result.

    before:  %a = reshape(%x, [1, 6, 4]); %y = einsum(%a, %b, "zab,zbc->zac")      # %x: [2, 3, 4], %b: a view of [4, 5]
    after:   %a = reshape(%x, [6, 4]); %p = einsum(%a, %b, "ab,bc->ac"); %y = reshape(%p, [1, 6, 5])
    """
    dropped = 0
    for node in list(graph.nodes):
        if node.target != einsum_p.op or not (letters := _unit_letters(node)):
            continue
        left, _, out = node.kwargs["equation"].partition("->")
        terms = left.split(",")
        kept = ["".join(letter for letter in term if letter not in letters) for term in (*terms, out)]
        with graph.inserting_before(node):
            operands = [
                operand if term == new else _without_units(graph, operand, [letter in new for letter in term])
                for operand, term, new in zip(node.args, terms, kept, strict=False)
            ]
            equation = f"{','.join(kept[:-1])}->{kept[-1]}"
            product = call_like(graph, node, einsum_p.op, tuple(operands), {**node.kwargs, "equation": equation})
            same = kept[-1] == out
            result = product if same else call_like(graph, node, aten.reshape.default, (product, list(shape_of(node))))
        result.meta["labels"] = labels_of(node)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        dropped += 1
    return {"unit_letters_dropped": dropped}


def _unit_letters(node: fx.Node) -> set[str]:
    """The letters of an einsum whose dims all have size 1 and come from views, if every operand has other letters too."""
    terms = node.kwargs["equation"].partition("->")[0].split(",")
    read = list(zip(node.args, terms, strict=True))
    larger = {letter for operand, term in read for letter, n in zip(term, shape_of(operand), strict=True) if n != 1}
    fixed = {letter for operand, term in read if operand.target != aten.reshape.default for letter in term}
    letters = set("".join(terms)) - larger - fixed
    return letters if all(set(term) - letters for term in terms) else set()


def _without_units(graph: fx.Graph, view: fx.Node, keep: list[bool]) -> fx.Node:
    """What a view reads, in the shape of the view without the dims of size 1 that are not kept."""
    shape = [n for n, kept in zip(shape_of(view), keep, strict=True) if kept]
    return call_like(graph, view, aten.reshape.default, (view.args[0], shape))
