"""Local programs of ops that move rows along a sharded dim: neighbours exchange the borders of their shards."""

import torch
from torch import fx

from mpar.sharding._borders import rows_from
from mpar.sharding._canonicalise import shape_of
from mpar.sharding._emit import Emit
from mpar.sharding._local_programs import along, argument, local_program
from mpar.sharding._rules import NodeRule, tensor_operands

__all__: list[str] = []

aten = torch.ops.aten


def _moved(emit: Emit, x: fx.Node, dim: int, by: int, fill: float | None) -> fx.Node:
    """The rows of this rank after all rows moved `by` places along `dim`; what comes in at the end is `fill`, or, if that is
    None, what went out at the other end. Only rows that move across a border are sent, or whole shards if rows move farther."""
    size, axes = emit.shape(x)[dim], emit.order_of(f"d{dim}")
    sent = min(abs(by), size)
    part = emit(aten.slice.Tensor, x, dim, size - sent, size) if by > 0 else emit(aten.slice.Tensor, x, dim, 0, sent)
    arrived = rows_from(emit, part, dim, axes, by if sent == size else sent if by > 0 else -sent, fill)
    if sent == size:
        return arrived
    staying = emit(aten.slice.Tensor, x, dim, 0, size - sent) if by > 0 else emit(aten.slice.Tensor, x, dim, sent, size)
    return emit(aten.cat.default, [arrived, staying] if by > 0 else [staying, arrived], dim)


def _rolled(node: fx.Node) -> NodeRule:
    """The rule of a roll. Without dims it moves elements as if all dims were one, and no dim can be sharded."""
    rule = along("dims")(node)
    if not argument(node, "dims"):
        rule.factors, rule.results, rule.replicate = [((),) * len(rule.factors[0])], [((),) * len(rule.results[0])], set()
    return rule


@local_program(_rolled, aten.roll.default)
def roll(emit: Emit, x: fx.Node, shifts: list[int], dims: list[int]) -> fx.Node:
    """One message for each sharded dim, of the rows that cross a border."""
    ndim = len(emit.shape(x))
    for shift, dim in zip(shifts, dims, strict=True):
        if not emit.axes_of(f"d{dim % ndim}"):
            x = emit(aten.roll.default, x, [shift], [dim])
            continue
        size = emit.size_of(f"d{dim % ndim}")
        nearest = (shift + size // 2) % size - size // 2
        emit.opaque()
        x = _moved(emit, x, dim % ndim, nearest, None) if nearest else x
    return x


def _padded(node: fx.Node) -> NodeRule:
    """The rule of a pad: it works across the dims in which it adds as much at one end as it cuts off at the other; no other
    dim in which it changes anything can be sharded."""
    (x,) = tensor_operands(node)
    shape = shape_of(x)
    sides = _sides(argument(node, "pad"), len(shape))
    names = tuple((f"d{i}",) if n > 1 and not sum(side) else () for i, (n, side) in enumerate(zip(shape, sides, strict=True)))
    crossed = {f"d{i}" for i, side in enumerate(sides) if any(side) and names[i]}
    linear = {0} if not argument(node, "value") else set()
    return NodeRule([x], [names], [names], {f"d{i}": n for i, n in enumerate(shape)}, crossed, linear)


def _sides(pad: list[int], ndim: int) -> list[tuple[int, int]]:
    """For each dim how many rows are added before and after those that there are."""
    given = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    return [(0, 0)] * (ndim - len(given)) + given[::-1]


@local_program(_padded, aten.constant_pad_nd.default)
def pad(emit: Emit, x: fx.Node, pad: list[int], value: float = 0) -> fx.Node:
    """One message for each sharded dim that moves, of the rows that cross a border."""
    ndim = len(emit.shape(x))
    sides = _sides(pad, ndim)
    moving = [i for i in range(ndim) if emit.axes_of(f"d{i}") and any(sides[i])]
    alone = [side for i in reversed(range(ndim)) for side in ((0, 0) if i in moving else sides[i])]
    x = emit(aten.constant_pad_nd.default, x, alone, value) if any(alone) else x
    emit.opaque()
    for dim in moving:
        x = _moved(emit, x, dim, sides[dim][0], value)
    return x
