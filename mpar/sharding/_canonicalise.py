"""Canonicalise: before a graph is lowered, several ops that mean the same become one, and matrix products become einsums.

Torch turns `x @ w` with an `x` of three dims into view, mm, view. The flattened dim could not be sharded along the sequence, so
the lowering would gather it.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from mpar.ops import PRIMITIVES
from mpar.sharding import _collectives as collectives
from mpar.sharding._pass import graph_pass

__all__ = ["call_like", "common_subexpressions", "is_zero", "labels_of", "shape_of", "view_groups"]

aten = torch.ops.aten
name_p, einsum_p = PRIMITIVES["named"], PRIMITIVES["einsum"]
VIEWS = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
IDENTITIES = (aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten.clone.default, aten.contiguous.default)
PRODUCTS = {
    aten.mm.default: "ab,bc->ac",
    aten.bmm.default: "zab,zbc->zac",
    aten.mv.default: "ab,b->a",
    aten.dot.default: "a,a->",
}
SAME = {
    aten._conj.default: aten.conj_physical.default,
    aten._neg_view.default: aten.neg.default,
    aten._unsafe_index.Tensor: aten.index.Tensor,
    aten._unsafe_index_put.default: aten.index_put.default,
    aten.diagonal_copy.default: aten.diagonal.default,
}
SUMS = (aten.sum.default, aten.sum.dim_IntList)
LIKE = {
    aten.zeros_like.default: 0,
    aten.ones_like.default: 1,
    aten.new_zeros.default: 0,
    aten.new_ones.default: 1,
    aten.zeros.default: 0,
    aten.ones.default: 1,
}


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The shape of the value of `node`."""
    return tuple(node.meta["val"].shape)


def labels_of(node: fx.Node) -> tuple[str, ...]:
    """The labels that `ops.name` gave this value."""
    return tuple(node.meta.get("labels", ()))


def is_zero(node: fx.Node) -> bool:
    """Whether a node of a logical or of a rank graph is known to hold zeros only."""
    while node.op == "call_function" and node.target in (aten.expand.default, collectives.shard):
        node = node.args[0]
    return node.target == aten.full.default and node.args[1] == 0


@graph_pass
def use_one_name(graph: fx.Graph) -> dict[str, int]:
    """Replace ops by those that give the same. Torch makes conjugates as views of which some ops want a copy.

    before:  %y = _conj(%x)
    after:   %y = conj_physical(%x)
    """
    renamed = [node for node in graph.nodes if node.target in SAME]
    for node in renamed:
        node.target = SAME[node.target]
    return {"ops_renamed": len(renamed)}


@graph_pass
def erase_identities(graph: fx.Graph) -> dict[str, int]:
    """Erase ops that return their operand: detach, clone, casts to the same dtype, and `name`, which leaves a label.

    before:  %y = clone(%x); %z = name(%y, "q")
    after:   users of %z read %x, which is labelled q
    """
    erased = 0
    for node in list(graph.nodes):
        if node.target == name_p.op:
            node.args[0].meta["labels"] = (*labels_of(node.args[0]), node.kwargs["label"])
        elif node.target == aten._to_copy.default and not _casts(node):
            pass
        elif node.target not in IDENTITIES:
            continue
        source = node.args[0]
        source.meta.setdefault("labels", ())
        node.replace_all_uses_with(source)
        graph.erase_node(node)
        erased += 1
    return {"identities_erased": erased}


@graph_pass
def restore_einsums(graph: fx.Graph) -> dict[str, int]:
    """Turn matrix products into einsums that read tensors of any number of dims.

    before:  %v = view(%x, [B*S, D]); %p = mm(%v, %w); %y = view(%p, [B, S, F])
    after:   %p = einsum(%x, %w, "abc,cd->abd"); %y = %p
    """
    restored = 0
    for node in list(graph.nodes):
        if node.target in (aten.addmm.default, aten.baddbmm.default):
            _split_bias(graph, node)
    for node in list(graph.nodes):
        if node.target in PRODUCTS and node.meta["val"].is_floating_point():
            _replace(graph, node, einsum_p.op, node.args, {"equation": PRODUCTS[node.target]})
            restored += 1
    for node in list(graph.nodes):
        while node.target == einsum_p.op:
            replacement = _absorb(graph, node)
            if replacement is None:
                break
            node = replacement
    return {"einsums_restored": restored}


@graph_pass
def split_means(graph: fx.Graph) -> dict[str, int]:
    """Replace a mean by a sum and a division by the global count: the mean of a shard is not the mean of the global tensor.

    before:  %y = mean(%x, [1])
    after:   %s = sum(%x, [1]); %y = div(%s, size of dim 1)

    Means and sums of a dtype narrower than float32 are added in float32, across ranks too, and rounded once, as torch does on one
    device: 70 000 ones have no sum in float16, and have a mean.

    before:  %s = sum(%x, [1])                              # %x: float16
    after:   %w = sum(%x, [1], dtype=float32); %s = _to_copy(%w, dtype=float16)
    """
    split = 0
    for node in list(graph.nodes):
        is_mean = node.target in (aten.mean.default, aten.mean.dim)
        dtype = node.meta["val"].dtype if is_mean or node.target in SUMS else torch.float32
        wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
        if not is_mean and wide == dtype:
            continue
        x = node.args[0]
        dims = list(node.args[1]) if len(node.args) > 1 and node.args[1] else list(range(len(shape_of(x))))
        keep = node.args[2] if len(node.args) > 2 else False
        with graph.inserting_before(node):
            kwargs = node.kwargs if wide == dtype else {"dtype": wide}
            result = call_like(graph, node, aten.sum.dim_IntList, (x, dims, keep), kwargs)
            if is_mean:
                result = call_like(graph, node, aten.div.Tensor, (result, math.prod(shape_of(x)[dim] for dim in dims)))
            if wide != dtype:
                result = call_like(graph, node, aten._to_copy.default, (result,), {"dtype": dtype})
        node.replace_all_uses_with(result)
        split += 1
    return {"means_split": split}


@graph_pass
def shrink_constants(graph: fx.Graph) -> dict[str, int]:
    """Make tensors filled with one number by expanding a scalar, so that a rank makes its shard without communication.

    before:  %z = zeros_like(%x)
    after:   %c = full([], 0); %z = expand(%c, shape of x)
    """
    shrunk = 0
    for node in list(graph.nodes):
        if node.target in LIKE:
            value = LIKE[node.target]
        elif node.target in (aten.full.default, aten.full_like.default, aten.new_full.default):
            value = node.args[2 if node.target == aten.new_full.default else 1]
        else:
            continue
        shape = list(shape_of(node))
        if not shape and node.target == aten.full.default:
            continue
        with graph.inserting_before(node):
            scalar = graph.call_function(
                aten.full.default, ([], value), {"dtype": node.meta["val"].dtype, "device": torch.device("cpu")}
            )
            scalar.meta["val"] = node.meta["val"].new_empty(()) if isinstance(node.meta["val"], torch.Tensor) else None
            wide = call_like(graph, node, aten.expand.default, (scalar, shape)) if shape else scalar
        node.replace_all_uses_with(wide)
        shrunk += 1
    return {"constants_shrunk": shrunk}


@graph_pass
def merge_views(graph: fx.Graph) -> dict[str, int]:
    """Merge chains of views and erase those that change nothing. Dims are permuted before they are merged, so that the view that
    splits them again, as in the gradient of a product of matrices by heads, meets the one that merged them.

    before:  %a = view(%x, [6]); %b = view(%a, [2, 3])      # %x: [2, 3]
    after:   users of %b read %x
    """
    merged = 0
    for node in list(graph.nodes):
        if node.target == aten.t.default:
            order = list(range(len(shape_of(node))))[::-1]
            node.target, node.args = aten.permute.default, (node.args[0], order)
        elif node.target == aten.transpose.int:
            order = list(range(len(shape_of(node))))
            i, j = (dim % len(order) for dim in node.args[1:])
            order[i], order[j] = order[j], order[i]
            node.target, node.args = aten.permute.default, (node.args[0], order)
        if node.target == aten.permute.default and node.args[0].target == aten.permute.default:
            inner = [dim % len(shape_of(node)) for dim in node.args[0].args[1]]
            node.args = (node.args[0].args[0], [inner[dim] for dim in node.args[1]])
            merged += 1
        if node.target == aten.permute.default and node.args[0].target == aten.reshape.default:
            merged += _permute_first(graph, node)
        if node.target == aten.permute.default and [dim % len(shape_of(node)) for dim in node.args[1]] == list(
            range(len(shape_of(node)))
        ):
            node.replace_all_uses_with(node.args[0])
            merged += 1
        if node.target in VIEWS:
            node.target, node.args = aten.reshape.default, (node.args[0], list(shape_of(node)))
            if node.args[0].target == aten.reshape.default:
                node.args = (node.args[0].args[0], node.args[1])
                merged += 1
            if shape_of(node.args[0]) == shape_of(node):
                node.replace_all_uses_with(node.args[0])
                merged += 1
    return {"views_merged": merged}


@graph_pass
def common_subexpressions(graph: fx.Graph) -> dict[str, int]:
    """Compute equal calls once.

    before:  %a = neg(%x); %b = neg(%x)
    after:   users of %b read %a
    """
    seen: dict[Any, fx.Node] = {}
    erased = 0
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        key = _key((node.target, node.args, sorted(node.kwargs.items())))
        if key in seen:
            first = seen[key]
            first.meta["labels"] = (*labels_of(first), *labels_of(node))
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            erased += 1
        else:
            seen[key] = node
    return {"subexpressions_erased": erased}


def view_groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Split a reshape into independent parts: each pairs dims of `before` with dims of `after` whose sizes have the same product.

    `view_groups((2, 3, 4), (6, 4)) == [([0, 1], [0]), ([2], [1])]`. A dim of size 1 may stand alone or join its neighbour.
    """
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        left, right = list(range(i, min(i + 1, len(before)))), list(range(j, min(j + 1, len(after))))
        while math.prod(before[d] for d in left) != math.prod(after[d] for d in right):
            if math.prod(before[d] for d in left) < math.prod(after[d] for d in right):
                left.append(i + len(left))
            else:
                right.append(j + len(right))
        groups.append((left, right))
        i, j = i + len(left), j + len(right)
    return groups


def _permute_first(graph: fx.Graph, node: fx.Node) -> bool:
    """Turn a permute of a view that merges dims into a view of a permute; returns whether it was possible.

    A view that splits dims too, `[4, 16] -> [8, 8]`, is read as one that splits, `[4, 2, 8]`, and one that merges.
    """
    view = node.args[0]
    source, shape = view.args[0], shape_of(view)
    groups = view_groups(shape_of(source), shape)
    if any(len(right) != 1 for _, right in groups):
        parts = _parts(shape_of(source), shape)
        if all(len(sizes) <= 1 for sizes in parts):
            return False
        with graph.inserting_before(node):
            source = call_like(graph, view, aten.reshape.default, (source, [n for sizes in parts for n in sizes or (1,)]))
        groups = view_groups(shape_of(source), shape)
        assert all(len(right) == 1 for _, right in groups), (shape_of(source), shape)
    sources = {right[0]: left for left, right in groups}
    order = [dim for position in _order(node) for dim in sources[position]]
    with graph.inserting_before(node):
        permuted = call_like(graph, node, aten.permute.default, (source, order))
        result = call_like(graph, node, aten.reshape.default, (permuted, list(shape_of(node))))
    result.meta["labels"] = labels_of(node)
    node.replace_all_uses_with(result)
    return True


def _parts(before: Sequence[int], after: Sequence[int]) -> list[list[int]]:
    """For each dim of `after` the sizes of its parts if every dim of either shape is made of whole parts; else no parts."""
    strides = sorted({math.prod(shape[dim:]) for shape in (before, after) for dim in range(len(shape) + 1)}, reverse=True)
    pairs = list(itertools.pairwise(strides))
    if 0 in strides or any(major % minor for major, minor in pairs):
        return [[] for _ in after]
    minor = [math.prod(after[dim + 1 :]) for dim in range(len(after))]
    return [
        [large // small for large, small in pairs if stride <= small and large <= stride * n]
        for n, stride in zip(after, minor, strict=True)
    ]


def _absorb(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Let an einsum read past a permute, or past a view that flattens dims, that makes one of its operands.

    Returns the einsum that replaces it, or None if no operand is made so.
    """
    left, _, out = node.kwargs["equation"].partition("->")
    terms = left.split(",")
    for index, operand in enumerate(node.args):
        if operand.op != "call_function":
            continue
        if operand.target in (aten.t.default, aten.transpose.int, aten.permute.default):
            source, order = operand.args[0], _order(operand)
            letters = [""] * len(order)
            for position, dim in enumerate(order):
                letters[dim] = terms[index][position]
            terms[index] = "".join(letters)
            args = [*node.args[:index], source, *node.args[index + 1 :]]
            return _replace(graph, node, einsum_p.op, tuple(args), {"equation": f"{','.join(terms)}->{out}"})
        if operand.target in VIEWS and len(set(terms[index])) == len(terms[index]):
            groups = view_groups(shape_of(operand.args[0]), shape_of(operand))
            if any(len(right) != 1 for _, right in groups) or all(len(left_dims) == 1 for left_dims, _ in groups):
                continue
            return _absorb_flattening(graph, node, index, groups)
    return None


def _absorb_flattening(graph: fx.Graph, node: fx.Node, index: int, groups: list[tuple[list[int], list[int]]]) -> fx.Node:
    left, _, out = node.kwargs["equation"].partition("->")
    terms = left.split(",")
    source = node.args[index].args[0]
    fresh = (chr(c) for c in range(ord("A"), ord("Z") + 1) if chr(c) not in node.kwargs["equation"])
    split: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for dims, (position,) in groups:
        letter = terms[index][position]
        names = letter if len(dims) == 1 else "".join(next(fresh) for _ in dims)
        split[letter] = names
        sizes |= dict(zip(names, (shape_of(source)[dim] for dim in dims), strict=True))
    args, new_terms = [], []
    with graph.inserting_before(node):
        for i, (operand, term) in enumerate(zip(node.args, terms, strict=True)):
            new_term = "".join(split.get(letter, letter) for letter in term)
            if i == index:
                args.append(source)
            elif new_term != term:
                known = dict(zip(term, shape_of(operand), strict=True)) | sizes
                args.append(call_like(graph, operand, aten.reshape.default, (operand, [known[letter] for letter in new_term])))
            else:
                args.append(operand)
            new_terms.append(new_term)
        new_out = "".join(split.get(letter, letter) for letter in out)
        product = call_like(graph, node, einsum_p.op, tuple(args), {"equation": f"{','.join(new_terms)}->{new_out}"})
        result = call_like(graph, node, aten.reshape.default, (product, list(shape_of(node)))) if new_out != out else product
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    return product


def _split_bias(graph: fx.Graph, node: fx.Node) -> None:
    product = aten.mm.default if node.target == aten.addmm.default else aten.bmm.default
    bias, beta, alpha = node.args[0], node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
    with graph.inserting_before(node):
        result = call_like(graph, node, product, node.args[1:3])
        result = result if alpha == 1 else call_like(graph, node, aten.mul.Tensor, (result, alpha))
        if beta != 0:  # torch does not read a bias that is multiplied by 0, so a NaN in it has no effect
            bias = bias if beta == 1 else call_like(graph, node, aten.mul.Tensor, (bias, beta))
            result = call_like(graph, node, aten.add.Tensor, (result, bias))
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _order(node: fx.Node) -> list[int]:
    rank = len(shape_of(node))
    if node.target == aten.permute.default:
        return [dim % rank for dim in node.args[1]]
    order = list(range(rank))
    if node.target == aten.t.default:
        return order[::-1]
    i, j = node.args[1] % rank, node.args[2] % rank
    order[i], order[j] = order[j], order[i]
    return order


def _casts(node: fx.Node) -> bool:
    return node.meta["val"].dtype != node.args[0].meta["val"].dtype


def call_like(graph: fx.Graph, like: fx.Node, target: Callable, args: tuple, kwargs: dict | None = None) -> fx.Node:
    """A new call of `target` with the source line of `like`; the shape of its value is found by running it without data."""
    node = graph.call_function(target, args, dict(kwargs or {}))
    meta_args, meta_kwargs = fx.node.map_arg((args, node.kwargs), lambda n: _meta(n.meta["val"]))
    if meta_kwargs.get("device") is not None:  # a copy to a device, which would need data
        meta_kwargs = {**meta_kwargs, "device": torch.device("meta")}
    node.meta = {"val": target(*meta_args, **meta_kwargs), "stack_trace": like.meta.get("stack_trace")}
    return node


def _replace(graph: fx.Graph, node: fx.Node, target: Callable, args: tuple, kwargs: dict) -> fx.Node:
    with graph.inserting_before(node):
        new = graph.call_function(target, args, kwargs)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return new


def _meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return type(value)(_meta(item) for item in value)


def _key(item: Any) -> Any:
    """A hashable stand-in for an argument, which differs for 1, 1.0 and True."""
    if isinstance(item, (list, tuple)):
        return tuple(_key(part) for part in item)
    if isinstance(item, (dict,)):
        return tuple((k, _key(v)) for k, v in sorted(item.items()))
    return (type(item).__name__, str(item)) if isinstance(item, (float, int, slice)) else item
