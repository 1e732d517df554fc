"""Dims: which dims of all values of a graph are one and the same, found by the sharding rules of its ops.

Every dim of a value is a product of factors, major first. Where an op joins dims, their factors are the same; where it reshapes,
a factor is split into smaller ones. A factor that some op needs whole can't be sharded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from torch import Tensor, fx

from mpar.ops import primitive_of
from mpar.sharding import LogicalGraph, programs_of, rule_of

__all__ = ["Dims", "Factor"]


class Factor:
    """A factor of dims. Its size may be split, major first, and it may be found to be another one.

    whole: why it cannot be sharded; empty if it can.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.whole = ""
        self.label: str | None = None
        self._same: Factor | None = None
        self._parts: tuple[Factor, ...] = ()

    def found(self) -> Factor:
        """The factor that stands for all that are the same as this one."""
        return self if self._same is None else self._same.found()

    def leaves(self) -> list[Factor]:
        """The factors that it is split into, or itself."""
        factor = self.found()
        return [leaf for part in factor._parts for leaf in part.leaves()] if factor._parts else [factor]

    def join(self, other: Factor) -> None:
        """Make both one. Neither is split."""
        a, b = self.found(), other.found()
        if a is not b:
            a.whole, a.label = a.whole or b.whole, a.label or b.label
            b._same = a

    def split(self, major: int) -> None:
        """Split it into a factor of size `major` and the rest."""
        factor = self.found()
        factor._parts = (Factor(major), Factor(factor.size // major))
        for part in factor._parts:
            part.whole = factor.whole


class Dims:
    """The factors of every dim of the values of `logical`."""

    def __init__(self, logical: LogicalGraph) -> None:
        self._of: dict[fx.Node, list[list[list[Factor]]]] = {}  # by node, for each of its results and dims
        for node in logical.graph.nodes:
            value = node.meta.get("val")
            if node.op == "output" or value is None:
                continue
            results = value if isinstance(value, (tuple, list)) else (value,)
            self._of[node] = [[[Factor(size)] for size in x.shape] if isinstance(x, Tensor) else [] for x in results]
        for node in logical.graph.nodes:
            if node.op == "call_function":
                self._read(node)

    def of(self, node: fx.Node) -> list[list[Factor]]:
        """For each dim of a value its factors, major first."""
        return [[leaf for factor in dim for leaf in factor.leaves()] for dim in self._of[node][0]]

    def _read(self, node: fx.Node) -> None:
        if getattr(node.target, "__name__", "") == "getitem" and isinstance(node.args[0], fx.Node):
            self._of[node] = [self._of[node.args[0]][node.args[1]]]
            return
        rule = rule_of(node)
        factors: dict[str, Factor] = {}
        tensors = [(self._of[operand][0], dims, operand) for operand, dims in zip(rule.operands, rule.factors, strict=True)]
        tensors += [(dims_of, dims, node) for dims_of, dims in zip(self._of[node], rule.results, strict=False)]
        for number, (dims_of, dims, owner) in enumerate(tensors):
            if number in rule.as_is:
                continue
            for own, names in zip(dims_of, dims, strict=True):
                if names:
                    joint = [factors.setdefault(name, Factor(rule.sizes[name])) for name in names if name in rule.sizes]
                    if len(joint) == len(names):
                        _join(own, joint, str(node.target))
                elif own and owner is not node and any(factor.size > 1 for factor in own):
                    _whole(own, str(node.target))
        # an op of torch that can work across shards does so by messages, which a strategy did not ask for: primitives alone may
        across = programs_of(node) if primitive_of(node.target) is None else ()
        for name in (*rule.replicate, *across):
            if name in factors:
                _whole([factors[name]], str(node.target))


def _leaves(factors: Iterable[Factor]) -> list[Factor]:
    return [leaf for factor in factors for leaf in factor.leaves() if leaf.size > 1]


def _join(left: Sequence[Factor], right: Sequence[Factor], op: str) -> None:
    """Make two products of factors one, factor by factor; what does not nest can't be sharded."""
    while True:
        a, b = _leaves(left), _leaves(right)
        pair = next(((x, y) for x, y in itertools.zip_longest(a, b) if x is not y), None)
        if pair is None:
            return
        x, y = pair
        if x is None or y is None:
            return
        if x.size == y.size:
            x.join(y)
        elif x.size > y.size and x.size % y.size == 0:
            x.split(y.size)
        elif y.size > x.size and y.size % x.size == 0:
            y.split(x.size)
        else:
            _whole([*a, *b], op)
            return


def _whole(factors: Iterable[Factor], op: str) -> None:
    for leaf in _leaves(factors):
        leaf.whole = leaf.whole or op
