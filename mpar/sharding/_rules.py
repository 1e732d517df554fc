"""Sharding rules of torch's own ops: which factors make their dims. Primitives have rules of their own.

Rules are about global shapes. An op without a rule has no factors, so every rank computes it on global operands. That is correct
for every op that is deterministic, functional and of static shape, but slow.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from mpar.ops import Primitive, ShardingRule, declared_rule, primitive_of
from mpar.sharding._canonicalise import PRODUCTS, shape_of, view_groups

__all__ = [
    "DIVIDED",
    "EXPANDED",
    "RULES",
    "Factors",
    "NodeRule",
    "fixed_program",
    "has_rule",
    "is_float_cast",
    "may_gather",
    "pointwise",
    "programs_of",
    "replicated",
    "rule_of",
    "tensor_operands",
]

aten = torch.ops.aten
Factors = tuple[tuple[str, ...], ...]


@dataclass
class NodeRule:
    """How one node may be sharded.

    operands:   its tensor operands, in order of appearance.
    factors:    for each dim of each operand the factors that make it, major first. A dim without factors is never sharded.
    results:    the same for its results.
    sizes:      the global size of each factor.
    replicate:  factors that must not be sharded.
    linear:     the numbers of operands in each of which the op is linear while the others are held fixed.
    jointly:    whether the op is linear in all operands together, as a sum is.
    localise:   (args, kwargs, local result shapes) -> (args, kwargs): puts local sizes into arguments that hold sizes.
    follows, as_is, ragged, leads: as in `ShardingRule`, with the numbers of operands in the place of names.
    """

    operands: list[fx.Node]
    factors: Sequence[Factors]
    results: Sequence[Factors]
    sizes: dict[str, int]
    replicate: set[str] = field(default_factory=set)
    linear: set[int] = field(default_factory=set)
    jointly: bool = False
    localise: Callable[[tuple, dict, list[tuple[int, ...]]], tuple[tuple, dict]] | None = None
    follows: dict[str, str] = field(default_factory=dict)
    as_is: set[int] = field(default_factory=set)
    ragged: dict[str, int] = field(default_factory=dict)
    leads: set[int] = field(default_factory=set)

    @property
    def shardable(self) -> set[str]:
        """The factors of operands that may be sharded. If there are none, every rank computes the op on global operands."""
        return {name for dims in self.factors for names in dims for name in names} - self.replicate


def rule_of(node: fx.Node) -> NodeRule:
    """The rule of a node of a canonical logical graph."""
    primitive = primitive_of(node.target)
    if primitive is not None:
        return _primitive_rule(node, primitive)
    if node.target in RULES:
        return RULES[node.target](node)
    declared = declared_rule(node.target)
    if declared is not None:
        return _declared(node, declared)
    if torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return pointwise(node)
    return replicated(node)


def programs_of(node: fx.Node) -> Mapping[str, Callable]:
    """For factors across which an op works, the local program of a rank if that factor is sharded."""
    primitive = primitive_of(node.target)
    if primitive is not None:
        return primitive.placement.sharded
    if node.target not in PROGRAMS:
        return {}
    rule, program = PROGRAMS[node.target]
    return dict.fromkeys(sorted(rule(node).replicate), program)


def fixed_program(node: fx.Node) -> Callable | None:
    """The local program that a rank runs for a node whatever is sharded."""
    primitive = primitive_of(node.target)
    if primitive is not None:
        return primitive.placement.lowered
    return PROGRAMS[node.target][1] if node.target in EXPANDED else None


def may_gather(node: fx.Node) -> bool:
    """Whether the dims across which an op works may be gathered in the place of running its local program, to send less."""
    return primitive_of(node.target) is None and node.target not in DIVIDED


def has_rule(node: fx.Node) -> bool:
    """Whether there is a sharding rule for the op of a node."""
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    stated = primitive_of(node.target) is not None or node.target in RULES or declared_rule(node.target) is not None
    return stated or pointwise


def is_float_cast(node: fx.Node) -> bool:
    """Whether a node only rounds its operand: it casts floats to floats."""
    return node.target == aten._to_copy.default and all(n.meta["val"].is_floating_point() for n in (node, *node.all_input_nodes))


def tensor_operands(node: fx.Node) -> list[fx.Node]:
    """The operands of `node` that are tensors, in order, with lists flattened; one that appears twice is listed twice."""
    found: list[fx.Node] = []

    def note(used: fx.Node) -> fx.Node:
        found.append(used)
        return used

    fx.node.map_arg((node.args, node.kwargs), note)
    return [n for n in found if isinstance(n.meta["val"], Tensor)]


def _primitive_rule(node: fx.Node, primitive: Primitive) -> NodeRule:
    rule = primitive.sharding_rule(**node.kwargs)
    values = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else (node.meta["val"],)
    ranks = [_num_dims(argument) for argument in node.args] + [value.ndim for value in values]
    operands: list[fx.Node] = []
    factors: list[Factors] = []
    linear: set[int] = set()
    at: dict[str, int] = {}
    leading = _num_leading((*rule.operands, *rule.results), ranks)
    sizes = dict(rule.sizes)
    for name, argument, dims in zip(primitive.operands, node.args, rule.operands, strict=True):
        for item in argument if isinstance(argument, (list, tuple)) else (argument,):
            if item is None:
                continue
            if name in rule.linear:
                linear.add(len(operands))
            at[name] = len(operands)
            operands.append(item)
            factors.append(_without_broadcasts(_expanded(dims, leading), shape_of(item), sizes))
    results = []
    for value, dims in zip(values, rule.results, strict=False):
        expanded = _expanded(dims, leading)
        # the gradient of an absent operand is an empty vector, which has no factors
        results.append(
            _without_broadcasts(expanded, tuple(value.shape), sizes) if len(expanded) == value.ndim else ((),) * value.ndim
        )
    if len(values) > len(rule.results):  # a list of results, each like the first
        results = [_without_broadcasts(_expanded(rule.results[0], leading), tuple(v.shape), sizes) for v in values]
    _solve_composites(factors, [shape_of(operand) for operand in operands], sizes)
    follows = dict(rule.follows)
    return NodeRule(
        operands,
        factors,
        results,
        sizes,
        set(rule.need_replication) - set(primitive.placement.sharded) - set(follows),
        linear,
        follows=follows,
        as_is={at[name] for name in rule.as_is},
        ragged={factor: at[name] for factor, name in rule.ragged},
        leads={at[name] for name in rule.leads},
    )


def _declared(node: fx.Node, rule: ShardingRule) -> NodeRule:
    """The rule of an op for which `declare_sharding` has stated one."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    values = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else (node.meta["val"],)
    names = [argument.name for argument in arguments if "Tensor" in str(argument.type)]
    by_name = {a.name: value for a, value in zip(arguments, node.args, strict=False)} | node.kwargs
    given = [
        (name, by_name[name], dims) for name, dims in zip(names, rule.operands, strict=True) if by_name.get(name) is not None
    ]
    all_dims = (*(dims for _, _, dims in given), *rule.results)
    leading = _num_leading(all_dims, [*(_num_dims(operand) for _, operand, _ in given), *(value.ndim for value in values)])
    sizes: dict[str, int] = {}
    factors = [_without_broadcasts(_expanded(dims, leading), shape_of(operand), sizes) for _, operand, dims in given]
    results = [
        _without_broadcasts(_expanded(dims, leading), tuple(value.shape), sizes)
        for value, dims in zip(values, rule.results, strict=True)
    ]
    operands = [operand for _, operand, _ in given]
    _solve_composites(factors, [shape_of(operand) for operand in operands], sizes)
    linear = {i for i, (name, _, _) in enumerate(given) if name in rule.linear}
    return NodeRule(operands, factors, results, sizes, set(rule.need_replication), linear)


def _num_dims(argument: Any) -> int | None:
    return len(shape_of(argument)) if isinstance(argument, fx.Node) else None


def _num_leading(all_dims: Sequence[Factors], ranks: Sequence[int | None]) -> int:
    for dims, rank in zip(all_dims, ranks, strict=False):
        if rank is not None and ("...",) in dims:
            return rank - (len(dims) - 1)
    return 0


def _expanded(dims: Factors, leading: int) -> Factors:
    if ("...",) not in dims:
        return dims
    at = dims.index(("...",))
    return (*dims[:at], *((f"leading{i}",) for i in range(leading)), *dims[at + 1 :])


def _without_broadcasts(dims: Factors, shape: tuple[int, ...], sizes: dict[str, int]) -> Factors:
    """`dims` without the factors of dims of size 1. The size of each dim that is made of one factor is noted in `sizes`."""
    out = []
    for factors, size in zip(dims, shape, strict=True):
        if len(factors) == 1:
            known = sizes.setdefault(factors[0], size)
            if known == 1 and size > 1:
                sizes[factors[0]] = size
            factors = () if size == 1 else factors
        out.append(factors)
    return tuple(out)


def _solve_composites(factors: list[Factors], shapes: list[tuple[int, ...]], sizes: dict[str, int]) -> None:
    """Find the size of the one unknown factor of a dim that is made of several, and note it in `sizes`."""
    for dims, shape in zip(factors, shapes, strict=True):
        for names, size in zip(dims, shape, strict=True):
            unknown = [name for name in names if name not in sizes]
            if len(names) > 1 and len(unknown) == 1:
                sizes[unknown[0]] = size // math.prod(sizes[name] for name in names if name in sizes)


def pointwise(node: fx.Node) -> NodeRule:
    """The rule of an element-wise op."""
    values = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else (node.meta["val"],)
    shape = tuple(values[0].shape)
    operands = tensor_operands(node)
    factors = []
    for operand in operands:
        sizes, offset = shape_of(operand), len(shape) - len(shape_of(operand))
        placed = enumerate(sizes, offset)
        factors.append(tuple((f"d{i}",) if size == shape[i] and size > 1 else () for i, size in placed))
    result = tuple((f"d{i}",) if size > 1 else () for i, size in enumerate(shape))
    rule = NodeRule(operands, factors, [result] * len(values), _dim_sizes(shape))
    num_tensors = len(operands)
    if node.target in (aten.add.Tensor, aten.sub.Tensor) and isinstance(node.args[1], fx.Node):
        rule.jointly = True
    elif node.target in (aten.mul.Tensor, aten.mul.Scalar) and (num_tensors == 1 or node.args[0] is not node.args[1]):
        rule.linear = set(range(num_tensors))
    elif (
        (
            node.target in (aten.div.Tensor, aten.div.Scalar)
            and node.args[0] is not node.args[1]
            and isinstance(node.args[0], fx.Node)
        )
        or node.target in (aten.neg.default, aten.clone.default)
        or (node.target == aten.masked_fill.Scalar and node.args[2] == 0)
    ):
        rule.linear = {0}
    return rule


def replicated(node: fx.Node) -> NodeRule:
    """The rule of an op that lets no dim be sharded."""
    operands = tensor_operands(node)
    values = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else (node.meta["val"],)
    factors: list[Factors] = [((),) * len(shape_of(operand)) for operand in operands]
    results = [((),) * v.ndim if isinstance(v, Tensor) else () for v in values]  # a gradient that is not asked for is None
    return NodeRule(operands, factors, results, {})


def _unread(node: fx.Node) -> NodeRule:
    """The rule of an op that reads no data of its operand, which may thus have any spec."""
    rule = replicated(node)
    rule.as_is = {0}
    return rule


def _sum(node: fx.Node) -> NodeRule:
    """The rule of a sum over the dims that its second argument gives, or over all of them."""
    x, *given = node.args
    shape = shape_of(x)
    dims = {dim % max(len(shape), 1) for dim in (given[0] if given and given[0] else range(len(shape)))}
    keep = given[1] if len(given) > 1 else node.kwargs.get("keepdim", False)
    factors = tuple((f"d{i}",) if size > 1 else () for i, size in enumerate(shape))
    result = tuple(() if i in dims else factors[i] for i in range(len(shape)) if keep or i not in dims)
    return NodeRule([x], [factors], [result], _dim_sizes(shape), linear={0})


def _permute(node: fx.Node) -> NodeRule:
    x = node.args[0]
    shape = shape_of(x)
    factors = tuple((f"d{i}",) if size > 1 else () for i, size in enumerate(shape))
    result = tuple(factors[dim % len(shape)] for dim in node.args[1])
    return NodeRule([x], [factors], [result], _dim_sizes(shape), linear={0})


def _expand(node: fx.Node) -> NodeRule:
    x, shape = node.args[0], shape_of(node)
    offset = len(shape) - len(shape_of(x))
    sizes = shape_of(x)
    factors = tuple((f"d{i + offset}",) if size == shape[i + offset] and size > 1 else () for i, size in enumerate(sizes))
    result = tuple((f"d{i}",) if i >= offset and factors[i - offset] else () for i in range(len(shape)))
    return NodeRule([x], [factors], [result], _dim_sizes(shape), linear={0}, localise=_local_sizes)


def _reshape(node: fx.Node) -> NodeRule:
    x = node.args[0]
    before, after = shape_of(x), shape_of(node)
    if 0 in before:
        return replicated(node)
    left: list[tuple[str, ...]] = [()] * len(before)
    right: list[tuple[str, ...]] = [()] * len(after)
    sizes: dict[str, int] = {}
    for number, (ins, outs) in enumerate(view_groups(before, after)):
        pieces = _common_pieces([before[i] for i in ins], [after[j] for j in outs])
        names = {start: f"v{number}_{start}" for start, _ in pieces}
        sizes |= {names[start]: size for start, size in pieces}
        for dims, shape, side in ((ins, before, left), (outs, after, right)):
            end = 1
            for dim in dims:
                begin, end = end, end * shape[dim]
                side[dim] = tuple(names[start] for start, _ in pieces if begin <= start < end)
    return NodeRule([x], [tuple(left)], [tuple(right)], sizes, linear={0}, localise=_local_sizes)


def _common_pieces(before: list[int], after: list[int]) -> list[tuple[int, int]]:
    """The factors of a reshape, as (product of all sizes before it, size): `[2, 3]` and `[6]` give `[(1, 2), (2, 3)]`.

    Shapes whose cuts do not nest, `[4, 6]` and `[3, 8]`, have no factors.
    """
    cuts = sorted({math.prod(shape[:end]) for shape in (before, after) for end in range(len(shape) + 1)})
    pairs = list(itertools.pairwise(cuts))
    return [(small, large // small) for small, large in pairs] if all(large % small == 0 for small, large in pairs) else []


def _dim_sizes(shape: Sequence[int]) -> dict[str, int]:
    return {f"d{i}": size for i, size in enumerate(shape)}


def _local_sizes(args: tuple, kwargs: dict, shapes: list[tuple[int, ...]]) -> tuple[tuple, dict]:
    return (args[0], list(shapes[0]), *args[2:]), kwargs


def _product(equation: str) -> Callable[[fx.Node], NodeRule]:
    """The rule of a product of integers: it stays an op of torch, while products of floats become einsums."""
    left, _, out = equation.partition("->")

    def rule(node: fx.Node) -> NodeRule:
        operands: list[fx.Node] = list(node.args[:2])
        sizes: dict[str, int] = {}
        factors = [tuple((letter,) for letter in term) for term in left.split(",")]
        for operand, dims in zip(operands, factors, strict=True):
            sizes |= {name: size for (name,), size in zip(dims, shape_of(operand), strict=True)}
        return NodeRule(operands, factors, [tuple((letter,) for letter in out)], sizes, linear={0, 1})

    return rule


PROGRAMS: dict[Any, tuple[Callable[[fx.Node], NodeRule], Callable]] = {}
"""Ops of torch with a local program, each with a rule that names in `replicate` the factors across which the op works."""

DIVIDED: set[Any] = set()
"""Ops whose local program divides much work. To gather what they work across would have every rank do all of it, so they never do
this to receive fewer bytes."""

EXPANDED: set[Any] = set()
"""Ops that only logical graphs have: a rank runs their local program whatever is sharded."""

RULES: dict[Any, Callable[[fx.Node], NodeRule]] = {
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.permute.default: _permute,
    aten.expand.default: _expand,
    aten.reshape.default: _reshape,
    **{op: _product(equation) for op, equation in PRODUCTS.items()},
    aten._to_copy.default: pointwise,
    aten.clone.default: pointwise,
    aten.empty_like.default: pointwise,
    aten.fill.Scalar: pointwise,
    aten.zeros_like.default: pointwise,
    aten.ones_like.default: pointwise,
    aten.new_empty.default: _unread,
}
