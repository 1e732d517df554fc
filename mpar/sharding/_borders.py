"""Borders: rows that a rank gets from the ranks before and behind it along a sharded dim, and gives back with what it added."""

import torch
from torch import fx

from mpar.sharding import _collectives as collectives
from mpar.sharding._emit import Emit

__all__ = ["return_borders", "rows_from", "with_borders"]

aten = torch.ops.aten


def rows_from(emit: Emit, part: fx.Node, dim: int, axes: tuple[str, ...], distance: int, fill: float | None) -> fx.Node:
    """Of the parts of all ranks along `axes`, put side by side along `dim`, the rows that are `distance` before those of this
    rank, or behind them if it is negative; beyond the ends `fill`, or, if that is None, the rows of the other end.

    Rows of the neighbour come by a shift. Shifts go to the next rank only: if rows move back among more than two ranks, or over
    mesh axes in another order, or farther than to the neighbour, all parts are gathered.
    """
    ndim, rows = len(emit.shape(part)), emit.shape(part)[dim]
    neighbour = abs(distance) == rows and (distance > 0 or emit.size(axes) == 2) and axes == emit.ordered(axes)
    counted = emit(aten.arange.default, rows, dtype=torch.int64, device=torch.device("cpu"))
    wanted = emit(aten.sub.Tensor, emit(aten.add.Tensor, counted, emit.start_with(axes, rows)), distance)
    if neighbour:
        part = emit(aten.clone.default, part, memory_format=torch.contiguous_format)
        (found,) = emit.arrived(emit.shift([part], axes), [part])
    else:
        around = emit(aten.remainder.Scalar, wanted, rows * emit.size(axes))
        found = emit(aten.index_select.default, emit.all_gather(part, axes, dim), dim, around)
    if fill is None:
        return found
    beyond = emit(aten.lt.Scalar, wanted, 0) if distance > 0 else emit(aten.ge.Scalar, wanted, rows * emit.size(axes))
    for new in [0] * dim + [-1] * (ndim - dim - 1):
        beyond = emit(aten.unsqueeze.default, beyond, new)
    return emit(aten.masked_fill.Scalar, found, beyond, fill)


def with_borders(emit: Emit, x: fx.Node, dim: int, axes: tuple[str, ...], before: int, after: int, fill: float) -> fx.Node:
    """The rows of this rank with so many before and after them; `fill` beyond the ends of the global tensor.

    Two messages, of the rows that are added. If they are more than a neighbour has, whole shards are gathered.
    """
    size, ndim = emit.shape(x)[dim], len(emit.shape(x))
    if max(before, after) > size:
        last = [0, 0] * (ndim - 1 - dim)
        whole = emit(aten.constant_pad_nd.default, emit.all_gather(x, axes, dim), [*last, before, after], fill)
        counted = emit(aten.arange.default, size + before + after, dtype=torch.int64, device=torch.device("cpu"))
        return emit(aten.index_select.default, whole, dim, emit(aten.add.Tensor, counted, emit.start_with(axes, size)))
    parts = [x]
    if before:
        parts.insert(0, rows_from(emit, emit(aten.slice.Tensor, x, dim, size - before, size), dim, axes, before, fill))
    if after:
        parts.append(rows_from(emit, emit(aten.slice.Tensor, x, dim, 0, after), dim, axes, -after, fill))
    return emit(aten.cat.default, parts, dim)


def return_borders(emit: Emit, x: fx.Node, dim: int, axes: tuple[str, ...], before: int, after: int) -> fx.Node:
    """The transpose of `with_borders`: what this rank has for rows of others is added to what they have for them.

    Two messages, of the rows that were added. If they are more than a neighbour has, the global tensor is summed.
    """
    ndim, size = len(emit.shape(x)), emit.shape(x)[dim] - before - after
    if max(before, after) > size:
        total = size * emit.size(axes)
        counted = emit(aten.arange.default, size + before + after, dtype=torch.int64, device=torch.device("cpu"))
        place = emit(aten.add.Tensor, counted, emit.start_with(axes, size))
        shape = [total + before + after if i == dim else n for i, n in enumerate(emit.shape(x))]
        zeros = emit(aten.full.default, shape, 0, dtype=x.meta["val"].dtype, device=torch.device("cpu"))
        summed = emit(aten.index_add.default, zeros, dim, place, x)
        summed = emit(collectives.all_reduce, summed, axes=emit.ordered(axes), op="sum", size=emit.size(axes))
        mine = emit(aten.add.Tensor, emit(aten.slice.Tensor, counted, 0, before, before + size), emit.start_with(axes, size))
        return emit(aten.index_select.default, summed, dim, mine)
    y = emit(aten.slice.Tensor, x, dim, before, before + size)
    last = [0, 0] * (ndim - 1 - dim)
    if before:  # of the rank before; what arrives are rows of this rank's end
        arrived = rows_from(emit, emit(aten.slice.Tensor, x, dim, 0, before), dim, axes, -before, 0)
        y = emit(aten.add.Tensor, y, emit(aten.constant_pad_nd.default, arrived, [*last, size - before, 0]))
    if after:
        arrived = rows_from(emit, emit(aten.slice.Tensor, x, dim, before + size, before + size + after), dim, axes, after, 0)
        y = emit(aten.add.Tensor, y, emit(aten.constant_pad_nd.default, arrived, [*last, 0, size - after]))
    return y
