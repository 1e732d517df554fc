"""Local programs of diagonals: a rank takes the part of the diagonal that its shard has, without a message."""

from collections.abc import Sequence

import torch
from torch import fx

from mpar.sharding._canonicalise import shape_of
from mpar.sharding._emit import Emit, Placed
from mpar.sharding._local_programs import argument, local_program
from mpar.sharding._rules import Factors, NodeRule, tensor_operands

__all__: list[str] = []

aten = torch.ops.aten
ROW, COLUMN = "row", "column"
"""The factor of the dim of which the diagonal has every index, and thus of the diagonal itself; and that of the other dim."""


def _diagonal(node: fx.Node) -> NodeRule:
    """The rule of a diagonal. If it has not every index of either dim, neither can be sharded; nor if it holds truth values, of
    which there are no pending sums."""
    (x,) = tensor_operands(node)
    matrix, line, sizes = _factors(node, shape_of(x), numbers=x.meta["val"].dtype != torch.bool)
    return NodeRule([x], [matrix], [line], sizes, {ROW, COLUMN} & sizes.keys(), linear={0})


def _diagonal_gradient(node: fx.Node) -> NodeRule:
    """The rule of the gradient of a diagonal, a matrix that is zero elsewhere."""
    (dy,) = tensor_operands(node)
    matrix, line, sizes = _factors(node, shape_of(node))
    return NodeRule([dy], [line], [matrix], sizes, {ROW, COLUMN} & sizes.keys(), linear={0}, localise=_local_sizes)


def _local_sizes(args: tuple, kwargs: dict, shapes: list[tuple[int, ...]]) -> tuple[tuple, dict]:
    return (args[0], list(shapes[0]), *args[2:]), kwargs


def _factors(node: fx.Node, shape: tuple[int, ...], *, numbers: bool = True) -> tuple[Factors, Factors, dict[str, int]]:
    """The factors of the matrix and of its diagonal, and their sizes."""
    dims = argument(node, "dim1"), argument(node, "dim2")
    crossed = {dim % len(shape) for dim in dims}
    named = {i: (f"d{i}",) if n > 1 and i not in crossed else () for i, n in enumerate(shape)}
    line: tuple[str, ...] = ()
    found = _lines(argument(node, "offset"), *dims, shape) if numbers else None
    if found is not None:
        row, column, _ = found
        line = (ROW,)
        named |= {row: line, column: (COLUMN,)}
    sizes = {name: n for i, n in enumerate(shape) for name in named[i]}
    return tuple(named[i] for i in range(len(shape))), (*(named[i] for i in range(len(shape)) if i not in crossed), line), sizes


def _lines(offset: int, dim1: int, dim2: int, shape: Sequence[int]) -> tuple[int, int, int] | None:
    """The dim of which the diagonal has every index, the other dim, and by how much the index of that one is larger; None if it
    has not every index of either, or only one."""
    first, second = dim1 % len(shape), dim2 % len(shape)
    if 1 in (shape[first], shape[second]):
        return None
    if 0 <= offset <= shape[second] - shape[first]:
        return first, second, offset
    return (second, first, -offset) if 0 <= -offset <= shape[first] - shape[second] else None


def _elsewhere(emit: Emit, ndim: int, row: int, column: int, above: int) -> fx.Node:
    """Where a matrix is not on the diagonal, for the rows and columns of this rank."""
    wanted = emit(aten.add.Scalar, emit.positions(ROW, ndim, row), above)
    return emit(aten.ne.Tensor, emit.positions(COLUMN, ndim, column), wanted)


@local_program(_diagonal, aten.diagonal.default)
def diagonal(emit: Emit, x: fx.Node, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Placed:
    """No message; if the columns are sharded, a pending sum of the size of the result."""
    ndim, lines = len(emit.shape(x)), _lines(offset, dim1, dim2, emit.global_shape(x))
    assert lines is not None, "a diagonal that has not every index of a dim is not sharded along it"
    row, column, above = lines
    alone = emit(aten.masked_fill.Scalar, x, _elsewhere(emit, ndim, row, column, above), 0)
    y = emit(aten.sum.dim_IntList, alone, [column], dtype=emit.dtype())
    place = row - (column < row)
    order = [*(i for i in range(ndim - 1) if i != place), place]
    y = y if place == ndim - 2 else emit(aten.permute.default, y, order)
    spec = x.meta["spec"]
    dims = [spec.dim(i) for i in (*(i for i in range(ndim) if i not in (row, column)), row)]
    return emit.placed(y, *dims, partial=(*spec.partial, *emit.order_of(COLUMN)))


@local_program(_diagonal_gradient, aten.diagonal_backward.default)
def diagonal_gradient(emit: Emit, dy: fx.Node, sizes: list[int], offset: int, dim1: int, dim2: int) -> fx.Node:
    """No message."""
    ndim, lines = len(sizes), _lines(offset, dim1, dim2, sizes)
    assert lines is not None, "a diagonal that has not every index of a dim is not sharded along it"
    row, column, above = lines
    place = row - (column < row)
    order = [*range(place), ndim - 2, *range(place, ndim - 2)]
    dy = dy if place == ndim - 2 else emit(aten.permute.default, dy, order)
    spread = emit(aten.unsqueeze.default, dy, column)
    return emit(aten.masked_fill.Scalar, spread, _elsewhere(emit, ndim, row, column, above), 0)
