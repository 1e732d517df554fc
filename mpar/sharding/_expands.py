"""Expand late: element-wise ops run before an expand, so that values which are equal along a dim are computed once.

The gradient of a mean is `div(expand(dy), n)`. Computed as written, every rank would make the global tensor and keep its shard.
"""

import math

import torch
from torch import fx

from mpar.sharding._canonicalise import call_like, shape_of
from mpar.sharding._pass import graph_pass

__all__ = ["expand_late", "merge_expands"]

aten = torch.ops.aten
MOVES = (aten.reshape.default, aten.permute.default, aten.expand.default)


@graph_pass
def merge_expands(graph: fx.Graph) -> dict[str, int]:
    """Erase expands that change nothing and join chains of them. A view of one expanded number becomes an expand of the number.

    before:  %a = expand(%c, [4, 6]); %b = reshape(%a, [24])      # %c: []
    after:   %b = expand(%c, [24])
    """
    merged = 0
    for node in list(graph.nodes):
        if node.target not in MOVES:
            continue
        source = node.args[0]
        if node.target == aten.expand.default and shape_of(source) == shape_of(node):
            node.replace_all_uses_with(source)
            merged += 1
        elif source.target == aten.expand.default:
            origin = source.args[0]
            single = math.prod(shape_of(origin)) == 1 and len(shape_of(origin)) <= len(shape_of(node))
            if node.target == aten.expand.default or single:
                node.target, node.args = aten.expand.default, (origin, list(shape_of(node)))
                merged += 1
    return {"expands_merged": merged}


@graph_pass
def expand_late(graph: fx.Graph) -> dict[str, int]:
    """Let element-wise ops read the operand of an expand in the place of its result, and expand their own result if needed.

    before:  %e = expand(%c, [4, 6]); %y = div(%e, 6)             # %c: []
    after:   %d = div(%c, 6); %y = expand(%d, [4, 6])
    """
    moved = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or not _elementwise(node):
            continue
        expanded = [n for n in node.all_input_nodes if n.target == aten.expand.default and _keeps_dtype(n, node)]
        if not expanded:
            continue
        sources = {n: n.args[0] for n in expanded}
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n, sources=sources: sources.get(n, n))
        with graph.inserting_before(node):
            small = call_like(graph, node, node.target, args, kwargs)
            if small.meta["val"].dtype != node.meta["val"].dtype:  # 0-d operands count less when dtypes are promoted
                graph.erase_node(small)
                continue
            same = shape_of(small) == shape_of(node)
            wide = small if same else call_like(graph, node, aten.expand.default, (small, list(shape_of(node))))
        wide.meta["labels"] = node.meta.get("labels", ())
        node.replace_all_uses_with(wide)
        graph.erase_node(node)
        moved += 1
    return {"expands_moved": moved}


def _elementwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target == aten._to_copy.default


def _keeps_dtype(expand: fx.Node, user: fx.Node) -> bool:
    """Whether all operands of `user`, except boolean ones, have one dtype, so that torch does not promote dtypes."""
    dtypes = {n.meta["val"].dtype for n in user.all_input_nodes} - {torch.bool}
    return len(dtypes) <= 1
