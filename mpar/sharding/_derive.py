"""Derive: the sharding rule of an op of torch, found from the op itself, for the check of rank graphs.

The lowering reads a table of rules (`_rules.py`). If the check read the same table, it would not notice a wrong entry. So it
takes nothing from there: element-wise ops are known by torch's tag, views by the strides of their results, reshapes by the places
where both shapes can be cut, reductions by the argument that torch calls `dim`. All other ops are run (`_probe.py`).
"""

import operator
from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor, fx

from mpar.ops import primitive_of
from mpar.sharding._canonicalise import shape_of
from mpar.sharding._probe import probed_rule
from mpar.sharding._rules import Factors, NodeRule, rule_of, tensor_operands

__all__ = ["derived_rule"]

aten = torch.ops.aten
VIEWS = {
    aten.permute.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    aten.unsqueeze.default,
}
ELEMENTWISE = {
    aten._to_copy.default,
    aten.clone.default,
    aten.empty_like.default,
    aten.fill.Scalar,
    aten.ones_like.default,
    aten.zeros_like.default,
}
"""Element-wise ops that torch does not tag as such."""
REDUCTIONS = {
    aten.all.default,
    aten.all.dim,
    aten.all.dims,
    aten.amax.default,
    aten.amin.default,
    aten.any.default,
    aten.any.dim,
    aten.any.dims,
    aten.argmax.default,
    aten.argmin.default,
    aten.linalg_vector_norm.default,
    aten.logsumexp.default,
    aten.max.default,
    aten.max.dim,
    aten.min.default,
    aten.min.dim,
    aten.prod.default,
    aten.prod.dim_int,
    aten.std.correction,
    aten.std_mean.correction,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.var.correction,
    aten.var_mean.correction,
}
PRODUCTS = {
    aten.mm.default: (("m", "c"), ("c", "n"), ("m", "n")),
    aten.bmm.default: (("z", "m", "c"), ("z", "c", "n"), ("z", "m", "n")),
    aten.mv.default: (("m", "c"), ("c",), ("m",)),
    aten.dot.default: (("c",), ("c",), ()),
}

FIRST = {
    *VIEWS,
    aten.clone.default,
    aten.div.Scalar,
    aten.div.Tensor,
    aten.expand.default,
    aten.mul.Scalar,
    aten.neg.default,
    aten.reshape.default,
    aten.sum.default,
    aten.sum.dim_IntList,
}
"""f(a + b) = f(a) + f(b) in the first operand, the others held fixed."""
EACH = {aten.mul.Tensor, *PRODUCTS}
"""Ops that are linear in each operand while the others are held fixed."""
TOGETHER = {aten.add.Tensor, aten.sub.Tensor}
"""f(a + b, c + d) = f(a, c) + f(b, d), if all operands are tensors."""


def derived_rule(node: fx.Node) -> NodeRule:
    """The rule of a node of a rank graph, whose `meta["val"]` must have global shapes; for a primitive, the declared rule."""
    if primitive_of(node.target) is not None:
        return rule_of(node)
    operands = tensor_operands(node)
    rule = _dims(node, operands)
    if rule is None:
        return probed_rule(node)
    if node.target in EACH:
        rule.linear = set(range(len(operands)))
    elif (node.target in FIRST and node.args[0] is operands[0]) or (node.target == aten.masked_fill.Scalar and node.args[2] == 0):
        rule.linear = {0}
    elif node.target == aten._to_copy.default:  # but for rounding
        rule.linear = {0} if node.meta["val"].is_floating_point() and operands[0].meta["val"].is_floating_point() else set()
    rule.jointly = node.target in TOGETHER and len(operands) == len(node.args)
    return rule


def _dims(node: fx.Node, operands: list[fx.Node]) -> NodeRule | None:
    """The rule of an op of torch, without what it says of linearity; None if only a run of the op can tell."""
    target = node.target
    if target == aten.reshape.default:
        return _cuts(node)
    if target in VIEWS or target == aten.expand.default:
        return _strides(node)
    if target in REDUCTIONS:
        return _reduced(node)
    if target in PRODUCTS:
        *terms, out = (tuple((name,) for name in dims) for dims in PRODUCTS[target])
        sizes = {name: n for operand, dims in zip(operands, terms, strict=True) for (name,), n in _zip(dims, shape_of(operand))}
        return NodeRule(operands, terms, [out], sizes)
    if torch.Tag.pointwise in getattr(target, "tags", ()) or target in ELEMENTWISE:
        return _same_place(operands, _values(node), lambda i: True)
    return _whole(node, operands, {0}) if target == aten.new_empty.default else None


def _whole(node: fx.Node, operands: list[fx.Node], unread: set[int]) -> NodeRule:
    """The rule of an op that lets no dim be sharded. `unread` operands may have any spec, because their data is not read."""
    factors: list[Factors] = [((),) * len(shape_of(operand)) for operand in operands]
    values = node.meta["val"] if isinstance(node.meta["val"], (list, tuple)) else [node.meta["val"]]
    results: list[Factors] = [((),) * value.ndim if isinstance(value, Tensor) else () for value in values]
    return NodeRule(operands, factors, results, {}, as_is=unread)


def _same_place(operands: list[fx.Node], values: list[Tensor], alone: Callable[[int], bool]) -> NodeRule:
    """The rule of an op whose operands and results have the same factors, dim by dim counted from the last.

    A dim has a factor if the op treats its indices independently, as `alone` says, and if its size is not broadcast.
    """
    given = [value for value in values if value is not None]
    rank = max(value.ndim for value in given)
    sizes: dict[str, int] = {}
    for value in given:  # a result that nobody reads may come with its local shape
        for i, n in enumerate(value.shape, rank - value.ndim):
            sizes[f"d{i}"] = max(n, sizes.get(f"d{i}", 0))

    def names(shape: Sequence[int]) -> Factors:
        places = enumerate(shape, rank - len(shape))
        return tuple((f"d{i}",) if n > 1 and n == sizes[f"d{i}"] and alone(i) else () for i, n in places)

    results = [() if v is None else names(v.shape) for v in values]
    return NodeRule(operands, [names(shape_of(o)) for o in operands], results, sizes)


def _strides(node: fx.Node) -> NodeRule:
    """The rule of a view: a dim of a result is a dim of the contiguous operand if it has the same stride and the same size."""
    (x,) = tensor_operands(node)
    source = torch.empty(shape_of(x), device="meta")
    args = (list(shape_of(node)),) if node.target == aten.expand.default else node.args[1:]
    views = node.target(source, *args, **node.kwargs)
    walked = {stride: (i, n) for i, (stride, n) in enumerate(_zip(source.stride(), source.shape)) if n > 1}
    results: list[Factors] = []
    for view in views if isinstance(views, (list, tuple)) else (views,):
        walked_dims = [(walked.get(stride, (-1, 0)), n) for stride, n in _zip(view.stride(), view.shape)]
        results.append(tuple((f"d{i}",) if n > 1 and n == size else () for (i, size), n in walked_dims))
    kept = set.intersection(*({name for dims in result for name in dims} for result in results))
    factors = tuple((f"d{i}",) if f"d{i}" in kept else () for i in range(source.ndim))
    return NodeRule([x], [factors], results, {f"d{i}": n for i, n in enumerate(source.shape)})


def _cuts(node: fx.Node) -> NodeRule:
    """The rule of a reshape. Its factors lie between neighbours among the strides of both shapes, if each divides the next."""
    (x,) = tensor_operands(node)
    before, after = shape_of(x), shape_of(node)
    if 0 in before:
        return _whole(node, [x], set())
    strides = sorted({*_suffixes(before), *_suffixes(after)})
    pieces = [(small, large) for small, large in _zip(strides[:-1], strides[1:])]
    sizes = {f"v{small}": large // small for small, large in pieces}

    def names(shape: tuple[int, ...]) -> Factors:
        ends = _suffixes(shape)
        out = []
        for minor, major in _zip(ends[1:], ends[:-1]):
            inside = [(small, large) for small, large in pieces if minor <= small and large <= major]
            nested = all(large % small == 0 for small, large in inside)
            out.append(tuple(f"v{small}" for small, _ in reversed(inside)) if nested else ())
        return tuple(out)

    factors, result = names(before), names(after)
    one_sided = {name for dims in factors for name in dims} ^ {name for dims in result for name in dims}
    return NodeRule([x], [factors], [result], sizes, replicate=one_sided)


def _suffixes(shape: tuple[int, ...]) -> list[int]:
    """For each dim the product of all sizes from it on, and a 1 at the end: `(2, 3)` gives `[6, 3, 1]`."""
    return [reduce(operator.mul, shape[i:], 1) for i in range(len(shape) + 1)]


def _reduced(node: fx.Node) -> NodeRule:
    """The rule of a reduction over the dims that `dim` gives, or over all dims. A sum over sharded dims becomes a pending sum."""
    (x,) = tensor_operands(node)
    shape, values = shape_of(x), _values(node)
    gone = _named_dims(node, len(shape)) or set(range(len(shape)))
    factors = tuple((f"d{i}",) if n > 1 else () for i, n in enumerate(shape))
    kept = values[0].ndim == len(shape)
    result = tuple(() if i in gone else factor for i, factor in enumerate(factors) if kept or i not in gone)
    adds = node.target in (aten.sum.default, aten.sum.dim_IntList)
    across = set() if adds else {name for i in gone for name in factors[i]}
    return NodeRule([x], [factors], [result] * len(values), {f"d{i}": n for i, n in enumerate(shape)}, replicate=across)


def _named_dims(node: fx.Node, rank: int) -> set[int]:
    """The dims that a node gives for the argument which torch's schema calls `dim` or `dims`, as indices from 0."""
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.name in ("dim", "dims"):
            given = node.kwargs.get(argument.name, node.args[place] if place < len(node.args) else argument.default_value)
            dims = [given] if isinstance(given, int) else given or []
            return {dim % max(rank, 1) for dim in dims}
    return set()


def _values(node: fx.Node) -> list[Tensor]:
    value = node.meta["val"]
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _zip(*columns: Sequence) -> list[tuple]:
    return list(zip(*columns, strict=True))
