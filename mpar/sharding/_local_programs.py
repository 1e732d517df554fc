"""Local programs: for ops of torch that work across a sharded dim, such as a softmax along it, without gathering the dim.

An op gets a local program here, in the form that primitives give to `def_sharded`: a function that writes, through `Emit`, what a
rank computes of its shard, and the collectives in between. The lowering uses it if a factor across which the op works is sharded;
if none is, the op itself runs on shards of its other dims. What each program sends is said in its docstring.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from mpar.sharding._canonicalise import shape_of
from mpar.sharding._emit import Emit
from mpar.sharding._rules import PROGRAMS, RULES, Factors, NodeRule, tensor_operands

__all__ = [
    "Dims",
    "Program",
    "along",
    "argument",
    "dims_of",
    "local_program",
    "peak",
    "reduction",
    "total",
    "values_of",
    "wide",
    "without",
]

aten = torch.ops.aten
Program = Callable[..., Any]
Rule = Callable[[fx.Node], NodeRule]
Dims = int | Sequence[int] | None
"""The dims that an argument gives; None or none stands for all."""
Argument: TypeAlias = Any
"""What torch's schema allows for an argument: a node, a number, a dtype, or a list of these."""


def local_program(rule: Rule, *ops: Callable) -> Callable[[Program], Program]:
    """Register a local program for `ops`; `rule` names in `replicate` the factors across which they work."""

    def with_factors(node: fx.Node) -> NodeRule:
        found = rule(node)
        found.replicate = set()
        return found

    def register(program: Program) -> Program:
        for op in ops:
            RULES[op], PROGRAMS[op] = with_factors, (rule, program)
        return program

    return register


def argument(node: fx.Node, name: str) -> Argument:
    """The value that a node gives for an argument of its op, or the default."""
    for place, known in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if known.name == name:
            return node.kwargs.get(name, node.args[place] if place < len(node.args) else known.default_value)
    raise AssertionError(f"{node.target} has no argument {name!r}")


def dims_of(ndim: int, dims: Dims) -> list[int]:
    """`dims`, which may be None, empty, a number or a list, as numbers from 0; none given stands for all."""
    given = [dims] if isinstance(dims, int) else list(dims or range(ndim))
    return sorted(dim % max(ndim, 1) for dim in given)


def values_of(node: fx.Node) -> list[Tensor]:
    """The values of all results of a node."""
    return list(node.meta["val"]) if isinstance(node.meta["val"], (list, tuple)) else [node.meta["val"]]


def along(name: str = "dim") -> Rule:
    """The rule of ops that work across the dims that argument `name` gives; operands and results have the same dims."""

    def rule(node: fx.Node) -> NodeRule:
        operands = tensor_operands(node)
        shape = shape_of(operands[0])
        crossed = dims_of(len(shape), argument(node, name))

        def factors(sizes: Sequence[int]) -> Factors:
            return tuple((f"d{i}",) if n == shape[i] and n > 1 else () for i, n in enumerate(sizes))

        names = {f"d{i}" for i in crossed if shape and shape[i] > 1}
        sizes = {f"d{i}": n for i, n in enumerate(shape)}
        results = [factors(value.shape) for value in values_of(node)]
        return NodeRule(operands, [factors(shape_of(o)) for o in operands], results, sizes, replicate=names)

    return rule


def reduction(node: fx.Node) -> NodeRule:
    """The rule of reductions over the dims that argument `dim` gives, or over all dims if the op has none or None is given."""
    (x,) = tensor_operands(node)
    shape = shape_of(x)
    names = [known.name for known in node.target._schema.arguments]  # type: ignore[union-attr]
    crossed = set(dims_of(len(shape), argument(node, "dim") if "dim" in names else None))
    values = values_of(node)
    keep = len(values[0].shape) == len(shape)
    factors = tuple((f"d{i}",) if n > 1 else () for i, n in enumerate(shape))
    result = tuple(() if i in crossed else factors[i] for i in range(len(shape)) if keep or i not in crossed)
    replicate = set() if x.meta["val"].is_complex() else {f"d{i}" for i in crossed if shape[i] > 1}
    if x.meta["val"].is_complex():
        factors = tuple(() if i in crossed else names for i, names in enumerate(factors))
    return NodeRule([x], [factors], [result] * len(values), {f"d{i}": n for i, n in enumerate(shape)}, replicate=replicate)


def wide(emit: Emit, x: fx.Node) -> fx.Node:
    """`x` in the dtype in which its elements are added: at least float32."""
    dtype = x.meta["val"].dtype
    if not dtype.is_floating_point:
        return emit.cast(x, torch.get_default_dtype())
    return emit.cast(x, torch.promote_types(dtype, torch.float32))


def total(emit: Emit, x: fx.Node, dims: list[int]) -> fx.Node:
    """The sum over `dims` of all ranks, which stay as dims of size 1: one all_reduce."""
    return emit.all_reduce(emit(aten.sum.dim_IntList, x, dims, True), "sum")


def peak(emit: Emit, x: fx.Node, dims: list[int]) -> fx.Node:
    """The maximum over `dims` of all ranks, which stay as dims of size 1: one all_reduce."""
    return emit.all_reduce(emit(aten.amax.default, x, dims, True), "max")


def without(emit: Emit, x: fx.Node, dims: list[int], keep: bool) -> fx.Node:
    """`x` without `dims`, which have size 1, unless they are to be kept."""
    for dim in () if keep else sorted(dims, reverse=True):
        x = emit(aten.select.int, x, dim, 0)
    return x
