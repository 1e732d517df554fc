"""Probe: what an op of torch does with the dims of its tensors, found by running it on small random numbers.

The table of the lowering says which dims an op treats independently. The check of rank graphs does not believe it: for each
such dim it runs the op on two halves and compares with the op on both. Where the table says that the op is linear in an operand,
it runs the op on two operands and on their sum.
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

import torch
from torch import Tensor, fx

from mpar.sharding._canonicalise import is_zero, shape_of
from mpar.sharding._rules import Factors, NodeRule, programs_of, rule_of

__all__ = ["probed_rule"]

WHOLE, HALF = 4, 2
"""The size of a factor in a probe, and of each of its two parts."""
LARGE, SMALL = 2**16, 8
"""With more elements than this, dims that cannot be sharded are cut to this size, if the op allows it."""
_found: dict[str, tuple[frozenset[str], frozenset[int], bool]] = {}
"""For each probe that was made the factors, the operands and the linearity that hold."""


def probed_rule(node: fx.Node) -> NodeRule:
    """The rule that the table has for a node, without the factors and the linearity that do not hold when the op runs."""
    claimed = rule_of(node)
    rule = _only(claimed, _names(claimed) - programs_of(node).keys())
    names = _names(rule) - rule.replicate
    kept = {name: rule.sizes[name] for name in sorted(_names(rule) & rule.replicate)}
    if not names and not rule.linear and not rule.jointly:
        return rule
    zero = [is_zero(operand) for operand in rule.operands]
    values = [operand.meta["val"] for operand in rule.operands]
    arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"].dtype)
    sizes = [
        [n for n, factors in zip(value.shape, dims, strict=True) if not factors]
        for value, dims in zip(values, rule.factors, strict=True)
    ]
    key = repr((node.target, arguments, sizes, kept, zero, rule.factors, rule.results, rule.linear, rule.jointly))
    if key not in _found:
        probe = _Probe(node, rule, zero)
        true = frozenset(name for name in names if probe.independent(name))
        linear = frozenset(i for i in rule.linear if probe.linear({i}))
        _found[key] = true, linear, rule.jointly and probe.linear(set(range(len(rule.operands))))
    true, linear, jointly = _found[key]
    return replace(_only(rule, true), linear=set(linear), jointly=jointly)


def _names(rule: NodeRule) -> set[str]:
    return {name for dims in (*rule.factors, *rule.results) for factors in dims for name in factors}


def _only(rule: NodeRule, names: Set[str]) -> NodeRule:
    """`rule` without other factors than `names`."""

    def kept(dims: Factors) -> Factors:
        return tuple(tuple(name for name in factors if name in names) for factors in dims)

    return replace(rule, factors=[*map(kept, rule.factors)], results=[*map(kept, rule.results)])


class _Probe:
    """An op with random operands in which every factor that may be sharded has the size `WHOLE`."""

    def __init__(self, node: fx.Node, rule: NodeRule, zero: Sequence[bool]) -> None:
        self.node, self.rule, self.zero = node, rule, zero
        self.generator = torch.Generator().manual_seed(0)
        self.sizes = {name: rule.sizes[name] if name in rule.replicate else WHOLE for name in _names(rule)}
        self.operands, self.expected = self.start()

    def start(self) -> tuple[list[Tensor], list[Tensor]]:
        """Operands on which the op runs, and its results; the smallest that it allows."""
        shapes = [_shape(shape_of(x), dims, self.sizes) for x, dims in zip(self.rule.operands, self.rule.factors, strict=True)]
        tries = [shapes]
        if max(map(math.prod, shapes)) > LARGE:
            tries = [[tuple(min(n, SMALL) for n in shape) for shape in shapes], shapes]
        for tried in tries:
            for largest in (2, 1, 0):
                operands = [self.numbers(i, shape, largest) for i, shape in enumerate(tried)]
                try:
                    return operands, self.run(operands, self.sizes)
                except (IndexError, RuntimeError, ValueError):
                    continue
        return [], []

    def numbers(self, index: int, shape: Sequence[int], largest: int) -> Tensor:
        """Random numbers for an operand; integers are indices between 1 and `largest`. Square matrices are well-conditioned."""
        dtype = self.rule.operands[index].meta["val"].dtype
        if self.zero[index]:
            return torch.zeros(shape, dtype=_wide(dtype))
        if dtype == torch.bool:
            return torch.rand(shape, generator=self.generator) < 0.5
        if not dtype.is_floating_point and not dtype.is_complex:
            return torch.randint(min(1, largest), largest + 1, shape, generator=self.generator, dtype=dtype)
        out = torch.rand(shape, generator=self.generator, dtype=_wide(dtype)) + 0.1
        square = len(shape) > 1 and shape[-1] == shape[-2]
        return out + shape[-1] * torch.eye(shape[-1], dtype=out.dtype) if square else out

    def run(self, operands: Sequence[Tensor], sizes: Mapping[str, int]) -> list[Tensor]:
        """The results of the op, whose factors have these sizes."""
        args, kwargs = self.node.args, self.node.kwargs
        values = self.node.meta["val"] if isinstance(self.node.meta["val"], (list, tuple)) else [self.node.meta["val"]]
        if self.rule.localise is not None:
            shapes = [
                _shape(tuple(value.shape), dims, sizes) if isinstance(value, Tensor) else ()
                for value, dims in zip(values, self.rule.results, strict=True)
            ]
            args, kwargs = self.rule.localise(args, kwargs, shapes)
        remaining = iter(operands)
        args, kwargs = fx.node.map_arg((args, kwargs), lambda n: next(remaining) if isinstance(n.meta["val"], Tensor) else n)
        with torch.no_grad():
            out = self.node.target(*args, **kwargs)  # type: ignore[operator]
        return [result for result in (out if isinstance(out, (list, tuple)) else [out])]

    def independent(self, factor: str) -> bool:
        """Whether the results are those of both halves of a factor, side by side, or added where a result lacks the factor."""
        if not self.expected:
            return False
        halves = [
            [_half(x, dims, factor, self.sizes, at) for x, dims in zip(self.operands, self.rule.factors, strict=True)]
            for at in (0, HALF)
        ]
        try:
            first, second = (self.run(half, {**self.sizes, factor: HALF}) for half in halves)
            joined = [
                _joined(a, b, dims, factor, self.sizes) for a, b, dims in zip(first, second, self.rule.results, strict=True)
            ]
        except (
            IndexError,
            RuntimeError,
            ValueError,
        ):  # the op refuses the halves, or results have not the shapes that factors give
            return False
        return _same(joined, self.expected)

    def linear(self, indices: set[int]) -> bool:
        """Whether the results of sums in these operands are the sums of the results."""
        if not self.expected:
            return False
        more = [self.numbers(i, x.shape, 1) if i in indices else x for i, x in enumerate(self.operands)]
        both = [x + y if i in indices else x for i, (x, y) in enumerate(zip(self.operands, more, strict=True))]
        added = [None if a is None else a + b for a, b in zip(self.expected, self.run(more, self.sizes), strict=True)]
        return _same(self.run(both, self.sizes), added)


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def _shape(shape: Sequence[int], dims: Factors, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """`shape` with the sizes of a probe in dims that have factors."""
    return tuple(math.prod(sizes[name] for name in names) if names else n for names, n in zip(dims, shape, strict=True))


def _split(x: Tensor, dims: Factors, factor: str, sizes: Mapping[str, int]) -> tuple[Tensor, int]:
    """`x` with every factor as a dim of its own, and which of these `factor` is; -1 if it is none."""
    names = [name for factors in dims for name in (factors or ("",))]
    shape = [sizes[name] if name else n for factors, n in zip(dims, x.shape, strict=True) for name in (factors or ("",))]
    return x.reshape(shape), names.index(factor) if factor in names else -1


def _half(x: Tensor, dims: Factors, factor: str, sizes: Mapping[str, int], at: int) -> Tensor:
    split, place = _split(x, dims, factor, sizes)
    if place < 0:
        return x
    return split.narrow(place, at, HALF).reshape(_shape(x.shape, dims, {**sizes, factor: HALF})).contiguous()


def _joined(a: Tensor | None, b: Tensor | None, dims: Factors, factor: str, sizes: Mapping[str, int]) -> Tensor | None:
    """One result of both halves: side by side along a factor, or added if it lacks the factor."""
    if a is None or b is None:
        return None
    halved = {**sizes, factor: HALF}
    if a.ndim != len(dims):
        return a
    (left, place), (right, _) = _split(a, dims, factor, halved), _split(b, dims, factor, halved)
    return a + b if place < 0 else torch.cat([left, right], place).reshape(_shape(a.shape, dims, sizes))


def _same(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> bool:
    return all(
        (a is None) == (b is None) and (a is None or b is None or (a.shape == b.shape and torch.allclose(a, b, equal_nan=True)))
        for a, b in zip(actual, expected, strict=True)
    )
