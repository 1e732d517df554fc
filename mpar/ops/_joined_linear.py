"""Joined linear: the products of one x with several matrices that do not change, as one product if these lie side by side.

A product with few rows takes as long as its matrix takes to be read, and small matrices are read slowly one after the other.
"""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mpar.errors import DtypeError, ShapeError
from mpar.op_shape import MatmulShape
from mpar.ops._packed_matrix import PackedMatrix
from mpar.ops._product import product
from mpar.ops.primitive import Cost, Primitive, ShardingRule
from mpar.torch_private import storage_key

__all__ = ["joined_linear", "joined_product", "lay_by_columns", "lay_side_by_side", "lie_side_by_side", "summed_dims"]

joined_linear_p = Primitive("joined_linear", "x, weights[] -> y", equation="str")


def joined_linear(equation: str, x: Tensor, weights: list[Tensor]) -> Tensor:
    """`y`: the products of `x` with each of `weights`, beside each other in the last dim.

    equation: of each product, such as "bsd,dnh->bsnh": what is summed are the last dims of `x` and the first of a weight, and the
              result has the other dims of both in their order. Those of the weight, its columns, are one dim of `y`.

    All have one floating dtype. Weights that `lie_side_by_side` are multiplied as one matrix. There is no gradient. Raises
    ShapeError or DtypeError if the operands do not fit the equation or each other.
    """
    return joined_linear_p.bind(x, weights, equation=equation)


@functools.lru_cache(maxsize=256)
def summed_dims(equation: str) -> int | None:
    """How many dims are summed, which are the last of x and the first of the weight; None for any other equation."""
    in_x, _, rest = equation.partition(",")
    in_w, _, output = rest.partition("->")
    for num_summed in range(1, min(len(in_x), len(in_w)) + 1):
        if in_x[-num_summed:] == in_w[:num_summed] and output == in_x[:-num_summed] + in_w[num_summed:]:
            return num_summed
    return None


@joined_linear_p.def_abstract
def _abstract(x, weights, *, equation):
    label = f"joined_linear {equation!r} of x {tuple(x.shape)}, weights {[tuple(w.shape) for w in weights]}"
    num_summed = summed_dims(equation)
    if num_summed is None or x.ndim != len(equation.partition(",")[0]) or not weights:
        raise ShapeError(
            f"{label}: the equation must be one such as 'bsd,df->bsf', with the dims of x, and there must be weights"
        )
    ndim, inner = len(equation.partition("->")[0]) - x.ndim - 1, tuple(x.shape[-num_summed:])
    if any(w.ndim != ndim or tuple(w.shape[:num_summed]) != inner for w in weights):
        raise ShapeError(f"{label}: each weight must have {ndim} dims, the first of which are {inner}")
    if not x.is_floating_point() or any(w.dtype != x.dtype for w in weights):
        raise DtypeError(f"{label}: dtypes are {x.dtype} and {[w.dtype for w in weights]}; all must have one floating dtype")
    return torch.empty((*x.shape[:-num_summed], sum(_columns(w, num_summed) for w in weights)), dtype=x.dtype, device=x.device)


@joined_linear_p.def_impl
def _impl(x: Tensor, weights: list[Tensor], *, equation: str) -> Tensor:
    num_summed = summed_dims(equation)
    assert num_summed is not None
    columns = [_columns(w, num_summed) for w in weights]
    if lie_side_by_side(weights, num_summed):
        return joined_product(x, weights[0], num_summed, sum(columns))
    x_MI = _rows(x, num_summed)
    y = x.new_empty(x_MI.shape[0], sum(columns))
    for part, weight in zip(y.split(columns, -1), weights, strict=True):
        torch.mm(x_MI, weight.flatten(num_summed).flatten(0, num_summed - 1), out=part)
    return y.view(*x.shape[:-num_summed], -1)


def joined_product(x: Tensor, first: Tensor, num_summed: int, columns: int) -> Tensor:
    """The product of `x` with a matrix of so many columns, the first of which are the weight `first`."""
    x_MI = _rows(x, num_summed)
    if type(first) is PackedMatrix:
        y = first.product(x_MI)
    else:
        inner = x_MI.shape[1]
        steps = (1, inner) if _has_columns(first, num_summed) else (first.stride(num_summed - 1), 1)
        y = product(x_MI, first.as_strided((inner, columns), steps))
    return y.view(*x.shape[:-num_summed], columns)


def _rows(x: Tensor, num_summed: int) -> Tensor:
    return x.reshape(-1, math.prod(x.shape[x.ndim - num_summed :]))


def lie_side_by_side(weights: Sequence[Tensor], num_summed: int) -> bool:
    """Whether these are neighbouring columns of one matrix in memory, as `lay_side_by_side` and `lay_by_columns` make them. First
    dims are rows."""
    first = weights[0]
    if type(first) is PackedMatrix:
        return first.are_all_columns(weights)
    place, own = first.storage_offset(), storage_key(first)
    if _has_columns(first, num_summed):
        return _follow_each_other(weights, num_summed)
    stride = first.stride(num_summed - 1)
    for weight in weights:
        if weight.storage_offset() != place or storage_key(weight) != own or not _is_part(weight, num_summed, stride):
            return False
        place += _columns(weight, num_summed)
    return place - first.storage_offset() <= stride


def _has_columns(weight: Tensor, num_summed: int) -> bool:
    """Whether the elements of a column are neighbours in memory, as `lay_by_columns` makes them, and not those of a row."""
    return weight.stride(num_summed - 1) == 1 and weight.stride(-1) != 1


def _follow_each_other(weights: Sequence[Tensor], num_summed: int) -> bool:
    """Whether the columns of each weight, without gaps, are behind those of the one before."""
    place, own = weights[0].storage_offset(), storage_key(weights[0])
    for weight in weights:
        by_columns = weight.permute(*range(num_summed, weight.ndim), *range(num_summed))
        if weight.storage_offset() != place or storage_key(weight) != own or not by_columns.is_contiguous():
            return False
        place += weight.numel()
    return True


def _is_part(weight: Tensor, num_summed: int, stride: int) -> bool:
    """Whether the columns of a row have no gaps, and rows have the distance `stride`."""
    steps = weight.stride()
    fits = steps[-1] == 1 and steps[num_summed - 1] == stride
    return fits and all(
        steps[dim] == steps[dim + 1] * weight.shape[dim + 1] for dim in range(weight.ndim - 1) if dim != num_summed - 1
    )


def lay_side_by_side(weights: Sequence[Tensor], num_summed: int) -> list[Tensor]:
    """Copies of weights that lie side by side."""
    matrix_IC = torch.cat([w.detach().flatten(num_summed).flatten(0, num_summed - 1) for w in weights], -1)
    parts = matrix_IC.split([_columns(w, num_summed) for w in weights], -1)
    shapes = [(w.shape[:num_summed], w.shape[num_summed:]) for w in weights]
    return [part.unflatten(-1, columns).unflatten(0, rows) for part, (rows, columns) in zip(parts, shapes, strict=True)]


def lay_by_columns(weights: Sequence[Tensor], given: Sequence[int]) -> list[Tensor]:
    """The same weights with the columns of the first, then those of the next, one after the other in memory, where a column is
    along the dims `given`. One that lies so already is not copied."""
    rest = [dim for dim in range(weights[0].ndim) if dim not in given]
    order = [*rest, *given]
    ordered = [weight.detach().permute(order) for weight in weights]
    if len(ordered) > 1 or not ordered[0].is_contiguous():
        flat = torch.cat([each.flatten(0, len(rest) - 1).flatten(1) for each in ordered])
        parts = flat.split([each.shape[: len(rest)].numel() for each in ordered])
        ordered = [part.reshape(each.shape) for part, each in zip(parts, ordered, strict=True)]
    return [each.permute([order.index(dim) for dim in range(each.ndim)]) for each in ordered]


def _columns(weight: Tensor, num_summed: int) -> int:
    return math.prod(weight.shape[num_summed:])


@joined_linear_p.def_sharding_from
def _sharding(*, equation: str) -> ShardingRule:
    """Columns of several weights have no size of their own, so they are not sharded; the compiler joins products of shards."""
    (in_x, _, rest), num_summed = equation.partition(","), summed_dims(equation) or 0
    in_w = rest.partition("->")[0]
    x, rows = tuple((c,) for c in in_x), tuple((c,) for c in in_x[:-num_summed])
    weight = (*((c,) for c in in_w[:num_summed]), *[()] * (len(in_w) - num_summed))
    return ShardingRule((x, weight), ((*rows, ()),), frozenset(), frozenset({"x"}))


@joined_linear_p.def_cost
def _cost(x, weights, *, equation):
    num_summed = summed_dims(equation) or 0
    inner, columns = math.prod(x.shape[-num_summed:]), sum(_columns(w, num_summed) for w in weights)
    shape = MatmulShape(batch=1, m=x.numel() // inner, n=columns, k=inner)
    moved = x.nbytes + sum(w.nbytes for w in weights) + x.nbytes // inner * columns
    return Cost(flops=2 * x.numel() * columns, bytes=moved, matmul=shape)
