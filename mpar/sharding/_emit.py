"""Emit: with this a local program, of a primitive or of an op of torch, writes its nodes while the op is lowered."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mpar.ops import Primitive
from mpar.sharding import _collectives as collectives
from mpar.sharding._rules import NodeRule
from mpar.spec import P

__all__ = ["Emit", "Pending", "Placed"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Pending:
    """A result that is a pending sum over the ranks that have different shards of the factor."""

    value: fx.Node


@dataclass(frozen=True)
class Placed:
    """A result whose spec the local program states."""

    value: fx.Node
    spec: P


class Emit:
    """With this the functions given to `def_sharded`, and those for ops of torch, write their local program; operands and results
    are local nodes.

    factors: the sharded factors for which the program is written; `axes` are the mesh axes that shard them.
    """

    def __init__(self, lowering: Any, rule: NodeRule, axes_of: dict[str, tuple[str, ...]], factors: Sequence[str]) -> None:
        self._lowering, self._rule, self._axes_of = lowering, rule, axes_of
        self.axes = axes_of[factors[0]] if len(factors) == 1 else self.axes_of(*factors)
        self._factors = tuple(factors)
        self._opaque = False

    def __call__(self, op: Any, /, *operands: Any, **params: Any) -> fx.Node:
        """Add a local node that calls `op`, a Primitive or an overload of a torch op."""
        node = self._lowering.emit(op.op if isinstance(op, Primitive) else op, operands, params)
        node.meta["in_program"] = True
        if self._opaque:
            node.meta["opaque"] = True
        return node

    def opaque(self) -> None:
        """Tell the check of rank graphs to take the specs of all nodes added from here on as the program claims them.

        This is for programs whose results cannot be understood from the factors of their ops.
        """
        self._opaque = True

    def same(self, value: fx.Node, axes: Iterable[str]) -> fx.Node:
        """Tell the check that `value` is the same on all ranks along `axes`, although an operand is not: that one only affects
        another result."""
        value.meta["same"] = tuple(axes)
        return value

    def stated(self, value: fx.Node, *dims: tuple[str, ...], partial: Iterable[str] = ()) -> fx.Node:
        """`value` with its spec, for the check of rank graphs, which else follows it by its global shape. It cannot do so where
        the arguments of an op hold local sizes."""
        value.meta["spec"] = P(*dims, partial=self.ordered(partial))
        return value

    def axes_of(self, *factors: str) -> tuple[str, ...]:
        """The mesh axes that shard any of these factors, in mesh order."""
        return self.ordered(axis for factor in factors for axis in self._axes_of.get(factor, ()))

    def order_of(self, factor: str) -> tuple[str, ...]:
        """The mesh axes that shard a factor, major first."""
        return self._axes_of.get(factor, ())

    def ordered(self, axes: Iterable[str]) -> tuple[str, ...]:
        """`axes` in mesh order."""
        return self._lowering.mesh.ordered(set(axes))

    def table(self, name: str) -> tuple[str, ...]:
        """The mesh axes to which the strategy maps a logical axis, in mesh order; none if its table does not have the axis."""
        return self.ordered(self._lowering.table.get(name, ()))

    def shape(self, value: fx.Node) -> tuple[int, ...]:
        """The local shape of an operand."""
        return tuple(value.meta["val"].shape)

    def global_shape(self, value: fx.Node) -> tuple[int, ...]:
        """The global shape of an operand."""
        return tuple(n * self.size(value.meta["spec"].dim(dim)) for dim, n in enumerate(self.shape(value)))

    def partial(self, value: fx.Node) -> tuple[str, ...]:
        """The mesh axes over which an operand is a pending sum."""
        return value.meta["spec"].partial

    def size(self, axes: tuple[str, ...]) -> int:
        """The number of ranks that differ along `axes`."""
        return self._lowering.mesh.axis_size(axes)

    def coordinate(self, axes: tuple[str, ...]) -> fx.Node | int:
        """This rank's coordinate along `axes`, counted as if they were one axis."""
        return self.start_with(axes, 1)

    def start_with(self, axes: tuple[str, ...], extent: int) -> fx.Node | int:
        """The index of this rank's first element if every rank along `axes` has `extent` of them."""
        return self._lowering.start(axes, extent)

    def placed(self, value: fx.Node, *dims: tuple[str, ...], partial: Iterable[str] = ()) -> Placed:
        """A result whose spec is `P(*dims, partial=...)`, whatever follows from its factors."""
        return Placed(value, P(*dims, partial=self.ordered(partial)))

    def shift(self, values: Sequence[fx.Node], axes: tuple[str, ...]) -> fx.Node:
        """Post the sending of `values` to the next rank along `axes` and the receipt of those of the previous rank; `arrived`
        waits for both."""
        return self(collectives.shift, list(values), axes=axes, size=self.size(axes))

    def exchange_rows(
        self, rows: fx.Node, sent: fx.Node, received: fx.Node, axes: tuple[str, ...], num_rows: int | None
    ) -> fx.Node:
        """Post an exchange of rows among the ranks along `axes`; `arrived` waits for it.

        `sent[i]` rows go to rank i, `received[i]` rows come from it. With `num_rows` the result is filled up with zeros to so
        many rows.
        """
        return self(collectives.exchange_rows, [rows], sent, received, axes=axes, size=self.size(axes), num_rows=num_rows)

    def arrived(self, posted: fx.Node, sent: Sequence[fx.Node]) -> list[fx.Node]:
        """Wait for a posted exchange; returns what has arrived. Only then may the memory of `sent` be used again."""
        waited = self(collectives.arrived, posted, list(sent))
        return [self.getitem(waited, index) for index in range(len(sent))]

    @property
    def start(self) -> fx.Node | int:
        """The global index of this rank's first element of the factor."""
        return self.start_of(self._factors[0])

    def start_of(self, factor: str) -> fx.Node | int:
        """The global index of this rank's first element of any factor of the op; 0 if the factor is not sharded."""
        axes = self._axes_of.get(factor, ())
        return self._lowering.start(axes, self.extent_of(factor))

    def extent_of(self, factor: str) -> int:
        """The local size of a factor."""
        return self._rule.sizes[factor] // self._lowering.mesh.axis_size(self._axes_of.get(factor, ()))

    def getitem(self, value: fx.Node, index: int) -> fx.Node:
        """One of several results."""
        return self(operator.getitem, value, index)

    def all_reduce(self, value: fx.Node, op: str) -> fx.Node:
        """The sum (op "sum") or maximum ("max") over the ranks that have different shards of the factor."""
        size = self._lowering.mesh.axis_size(self.axes)
        return self(collectives.all_reduce, value, axes=self.axes, op=op, size=size)

    def all_to_all(self, value: fx.Node, axes: tuple[str, ...], *, src: int, dst: int) -> fx.Node:
        """From sharded along dim `src` to sharded along dim `dst`."""
        return self(collectives.all_to_all, value, axes=axes, src=src, dst=dst, size=self.size(axes))

    def all_gather(self, value: fx.Node, axes: tuple[str, ...], dim: int) -> fx.Node:
        """The values of the ranks along `axes`, major first, concatenated along `dim`."""
        for group in [axes] if axes == self.ordered(axes) else [(axis,) for axis in reversed(axes)]:
            value = self(collectives.all_gather, value, axes=group, dim=dim, size=self.size(group))
        return value

    def shard(self, value: fx.Node, factor: str, dim: int) -> fx.Node:
        """This rank's part along `dim` of a value that all ranks have; it is cut as `factor` is."""
        axes = self._axes_of.get(factor, ())
        return self(collectives.shard, value, axes=axes, dim=dim, size=self.size(axes)) if axes else value

    def positions(self, factor: str, ndim: int, dim: int) -> fx.Node:
        """The global indices of this rank's elements of `factor`, along `dim` of a value with `ndim` dims."""
        every = self(aten.arange.default, self.size_of(factor), dtype=torch.int64, device=torch.device("cpu"))
        value = self.shard(every, factor, 0)
        for new in [0] * dim + [-1] * (ndim - dim - 1):
            value = self(aten.unsqueeze.default, value, new)
        return value

    def cast(self, value: fx.Node, dtype: torch.dtype) -> fx.Node:
        """`value` in `dtype`."""
        same = value.meta["val"].dtype == dtype
        return value if same else self(aten._to_copy.default, value, dtype=dtype)

    def dtype(self, result: int = 0) -> torch.dtype:
        """The dtype of one of the op's results."""
        value = self._lowering.current.meta["val"]
        return (value[result] if isinstance(value, (list, tuple)) else value).dtype

    def size_of(self, factor: str) -> int:
        """The global size of a factor."""
        return self._rule.sizes[factor]

    def pending(self, value: fx.Node) -> Pending:
        """Mark a result as a pending sum over the ranks that have different shards of the factor."""
        return Pending(value)
