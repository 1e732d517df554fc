"""Local programs of ops that write elements by an index: a rank writes what belongs into its shard, without a message.

What belongs to other ranks is written into one more row, which is then cut off. So every op keeps its own meaning where several
elements are written into one place: the last one, their sum, their largest.
"""

from collections.abc import Callable

import torch
from torch import fx

from mpar.sharding._canonicalise import shape_of
from mpar.sharding._emit import Emit
from mpar.sharding._local_programs import Program, argument, local_program
from mpar.sharding._local_rows import ROWS, mine
from mpar.sharding._rules import NodeRule, tensor_operands

__all__: list[str] = []

aten = torch.ops.aten


def _written(node: fx.Node) -> NodeRule:
    """The rule of ops that write at the rows that an index names. Along a dim that all tensors have in the same size, the op is
    independent; the index of `index_copy` and of its kin has no dim but that of the rows."""
    operands = tensor_operands(node)
    x, index, *others = (shape_of(operand) for operand in operands)
    dim = argument(node, "dim") % max(len(x), 1)
    by_row = node.target in BY_ROW
    read = [shape for shape in others if shape] if by_row else [index, *others]
    alone = tuple(
        (f"d{i}",) if i != dim and n > 1 and all(len(shape) == len(x) and shape[i] == n for shape in read) else ()
        for i, n in enumerate(x)
    )
    of_x = tuple((ROWS,) if i == dim and n > 1 else names for i, names, n in zip(range(len(x)), alone, x, strict=True))
    factors = [of_x, *(alone if shape in read and len(shape) == len(x) else ((),) * len(shape) for shape in (index, *others))]
    if by_row:
        factors[1] = ((),) * len(index)
    linear = {0} if node.target == aten.scatter.value and argument(node, "value") == 0 else set()
    sizes = {name: n for names, n in zip(of_x, x, strict=True) for name in names}
    return NodeRule(operands, factors, [of_x], sizes, {ROWS} if (ROWS,) in of_x else set(), linear)


def _write(op: Callable) -> Program:
    def program(emit: Emit, x: fx.Node, dim: int, index: fx.Node, *others: object, **kwargs: object) -> fx.Node:
        """No message."""
        ndim, size = len(emit.shape(x)), emit.extent_of(ROWS)
        if op in NEGATIVE:
            index = emit(aten.remainder.Scalar, index, emit.size_of(ROWS))
        place, outside = mine(emit, index)
        place = emit(aten.masked_fill.Scalar, place, outside, size)
        with_room = emit(aten.constant_pad_nd.default, x, [0, 0] * (ndim - 1 - dim % ndim) + [0, 1])
        return emit(aten.slice.Tensor, emit(op, with_room, dim, place, *others, **kwargs), dim % ndim, 0, size)

    return program


NEGATIVE = {aten.index_fill.int_Scalar, aten.index_fill.int_Tensor}
"""Ops whose index may count from the end."""
BY_ROW = {*NEGATIVE, aten.index_copy.default, aten.index_reduce.default}
"""Ops whose index has one dim: it names whole rows."""
ELEMENTWISE = {
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter.reduce,
    aten.scatter.value_reduce,
    aten.scatter_reduce.two,
}
for each in (*BY_ROW, *ELEMENTWISE):
    local_program(_written, each)(_write(each))
