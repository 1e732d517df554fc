"""Flatten late: ops that treat the indices of merged dims independently run before the dims are merged.

torch flattens batch and sequence for a linear layer with a bias, and people do so for a loss. A flattened dim cannot be sharded
as its second part is, so the lowering would gather it.
"""

import math

import torch
from torch import fx

from mpar.sharding._canonicalise import call_like, labels_of, shape_of, view_groups
from mpar.sharding._pass import graph_pass

__all__ = ["flatten_late"]

aten = torch.ops.aten
ALONG = {
    aten._log_softmax.default: 1,
    aten._log_softmax_backward_data.default: 2,
    aten._softmax.default: 1,
    aten._softmax_backward_data.default: 2,
    aten.gather.default: 1,
    aten.scatter_add.default: 1,
}
"""Ops that work along one dim, and the number of the argument that names it."""
SUMS = {aten.sum.default, aten.sum.dim_IntList}

Splits = dict[int, tuple[int, ...]]
"""By position of a dim, counted from the last one, -1: the sizes of the dims that were merged into it."""


@graph_pass
def flatten_late(graph: fx.Graph) -> dict[str, int]:
    """Let an op read what a view merges dims of, and merge the dims of its result.

    before:  %a = reshape(%x, [6, 4]); %y = add(%a, %b)            # %x: [2, 3, 4], %b: [4]
    after:   %s = add(%x, %b); %y = reshape(%s, [6, 4])
    """
    moved = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or not (_elementwise(node) or node.target in {*ALONG, *SUMS}):
            continue
        operands = [n for n in node.all_input_nodes if isinstance(n.meta["val"], torch.Tensor)]
        splits = next((found for n in operands if (found := _merged(n))), {})
        views = {n: _split_shape(n, splits) for n in operands}
        if not splits or not all(_can_be_read(n, shape) for n, shape in views.items()):
            continue
        if node.target in ALONG and _place(node, node.args[ALONG[node.target]]) in splits:
            continue
        with graph.inserting_before(node):
            read = {n: _read(graph, n, shape) for n, shape in views.items() if shape}
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n, read=read: read.get(n, n))
            inner = call_like(graph, node, node.target, _with_dims(node, args, splits), kwargs)
            same = shape_of(inner) == shape_of(node)
            result = inner if same else call_like(graph, node, aten.reshape.default, (inner, list(shape_of(node))))
        result.meta["labels"] = labels_of(node)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        moved += 1
    return {"flattens_moved": moved}


def _elementwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in (aten._to_copy.default, aten.fill.Scalar)


def _merged(node: fx.Node) -> Splits:
    """The dims that the view `node` merges, if it does nothing but merge dims, and insert and remove dims of size 1."""
    if node.target != aten.reshape.default:
        return {}
    before, after = shape_of(node.args[0]), shape_of(node)
    groups = [
        ([d for d in left if before[d] != 1], [d for d in right if after[d] != 1]) for left, right in view_groups(before, after)
    ]
    if any(len(right) > 1 for _, right in groups):
        return {}
    return {right[0] - len(after): tuple(before[d] for d in left) for left, right in groups if len(left) > 1}


def _split_shape(node: fx.Node, splits: Splits) -> list[int]:
    """The shape of an operand with the dims in `splits` split again; empty if it has none of them."""
    shape = shape_of(node)
    places = range(-len(shape), 0)
    if not any(place in splits for place in places):
        return []
    parts = []
    for place, n in zip(places, shape, strict=True):
        sizes = splits.get(place, (n,))
        parts.append(sizes if n != 1 else (1,) * len(sizes))
    return [n for part in parts for n in part]


def _can_be_read(node: fx.Node, shape: list[int]) -> bool:
    """Whether an operand has this shape but for dims of size 1, or is a view of something that has."""
    sizes = [n for n in shape if n != 1]
    sources = [node, node.args[0]] if node.target == aten.reshape.default else [node]
    return not shape or any([n for n in shape_of(source) if n != 1] == sizes for source in sources)


def _read(graph: fx.Graph, node: fx.Node, shape: list[int]) -> fx.Node:
    source = node.args[0] if node.target == aten.reshape.default and math.prod(shape) > 1 else node
    return source if list(shape_of(source)) == shape else call_like(graph, node, aten.reshape.default, (source, shape))


def _with_dims(node: fx.Node, args: tuple, splits: Splits) -> tuple:
    """The arguments of an op with the dims that they name counted after the split."""
    if node.target in ALONG:
        number = ALONG[node.target]
        return (*args[:number], *_places_after(_place(node, args[number]), splits), *args[number + 1 :])
    if node.target == aten.sum.dim_IntList and args[1]:
        dims = [place for dim in args[1] for place in _places_after(_place(node, dim), splits)]
        return (args[0], dims, *args[2:])
    return args


def _place(node: fx.Node, dim: int) -> int:
    """The position of a dim of the first operand, counted from the last one."""
    rank = len(shape_of(node.args[0]))
    return dim % rank - rank


def _places_after(place: int, splits: Splits) -> list[int]:
    """Where a dim is once dims are split, counted from the last one: as many positions as it has parts."""
    last = place - sum(len(sizes) - 1 for other, sizes in splits.items() if other > place)
    return list(range(last - len(splits.get(place, (1,))) + 1, last + 1))
