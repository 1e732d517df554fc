"""Emit: with this a primitive writes its local program, node by node, while it is lowered."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from mpar.ops import Primitive
from mpar.sharding import _collectives as collectives
from mpar.sharding._rules import NodeRule
from mpar.spec import P

__all__ = ["Emit", "Pending", "Placed"]


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
    """With this the functions given to `def_sharded` write their local program; operands and results are local nodes.

    factor: the factor that is sharded, for which the program is written; `axes` are the mesh axes that shard it.
    """

    def __init__(self, lowering: Any, rule: NodeRule, axes_of: dict[str, tuple[str, ...]], factor: str) -> None:
        self._lowering, self._rule, self._axes_of = lowering, rule, axes_of
        self.axes = axes_of.get(factor, ())
        self._factor = factor
        self._opaque = False

    def __call__(self, op: Any, /, *operands: Any, **params: Any) -> fx.Node:
        """Add a local node that calls `op`, a Primitive or an overload of a torch op."""
        node = self._lowering.emit(op.op if isinstance(op, Primitive) else op, operands, params)
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

    def axes_of(self, *factors: str) -> tuple[str, ...]:
        """The mesh axes that shard any of these factors, in mesh order."""
        return self.ordered(axis for factor in factors for axis in self._axes_of.get(factor, ()))

    def ordered(self, axes: Iterable[str]) -> tuple[str, ...]:
        """`axes` in mesh order."""
        return self._lowering.mesh.ordered(set(axes))

    def table(self, name: str) -> tuple[str, ...]:
        """The mesh axes to which the strategy maps a logical axis, in mesh order; none if its table does not have the axis."""
        return self.ordered(self._lowering.table.get(name, ()))

    def shape(self, value: fx.Node) -> tuple[int, ...]:
        """The local shape of an operand."""
        return tuple(value.meta["val"].shape)

    def partial(self, value: fx.Node) -> tuple[str, ...]:
        """The mesh axes over which an operand is a pending sum."""
        return value.meta["spec"].partial

    def size(self, axes: tuple[str, ...]) -> int:
        """The number of ranks that differ along `axes`."""
        return self._lowering.mesh.axis_size(axes)

    def coordinate(self, axes: tuple[str, ...]) -> fx.Node | int:
        """This rank's coordinate along `axes`, counted as if they were one axis."""
        return self._lowering.start(axes, 1)

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
        return self.start_of(self._factor)

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

    def pending(self, value: fx.Node) -> Pending:
        """Mark a result as a pending sum over the ranks that have different shards of the factor."""
        return Pending(value)
