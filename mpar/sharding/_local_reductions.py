"""Local programs of reductions: of maxima, of sums of squares and powers, of probabilities, of running sums."""

from collections.abc import Callable

import torch
from torch import fx

from mpar.sharding._emit import Emit
from mpar.sharding._local_programs import Dims, along, dims_of, local_program, peak, reduction, total, wide, without

__all__: list[str] = []

aten = torch.ops.aten
NONE = torch.iinfo(torch.int64).max
"""A position behind every element."""


@local_program(along(), aten._softmax.default)
def softmax(emit: Emit, x: fx.Node, dim: int, half_to_float: bool) -> fx.Node:
    """Two all_reduces of the size of the input without `dim`: of the maximum and of the sum of exponentials."""
    dim = dim % len(emit.shape(x))
    weights = emit(aten.exp.default, _below_peak(emit, x, dim))
    return emit.cast(emit(aten.div.Tensor, weights, total(emit, weights, [dim])), emit.dtype())


@local_program(along(), aten._log_softmax.default)
def log_softmax(emit: Emit, x: fx.Node, dim: int, half_to_float: bool) -> fx.Node:
    """Two all_reduces of the size of the input without `dim`: of the maximum and of the sum of exponentials."""
    dim = dim % len(emit.shape(x))
    below = _below_peak(emit, x, dim)
    log_sum = emit(aten.log.default, total(emit, emit(aten.exp.default, below), [dim]))
    return emit.cast(emit(aten.sub.Tensor, below, log_sum), emit.dtype())


def _below_peak(emit: Emit, x: fx.Node, dim: int) -> fx.Node:
    x = wide(emit, x)
    return emit(aten.sub.Tensor, x, peak(emit, x, [dim]))


@local_program(along(), aten._softmax_backward_data.default)
def softmax_backward(emit: Emit, dy: fx.Node, y: fx.Node, dim: int, input_dtype: torch.dtype) -> fx.Node:
    """One all_reduce of the size of the input without `dim`."""
    y = wide(emit, y)
    weighted = emit(aten.mul.Tensor, wide(emit, dy), y)
    share = emit(aten.mul.Tensor, y, total(emit, weighted, [dim % len(emit.shape(y))]))
    return emit.cast(emit(aten.sub.Tensor, weighted, share), emit.dtype())


@local_program(along(), aten._log_softmax_backward_data.default)
def log_softmax_backward(emit: Emit, dy: fx.Node, y: fx.Node, dim: int, input_dtype: torch.dtype) -> fx.Node:
    """One all_reduce of the size of the input without `dim`."""
    dy = wide(emit, dy)
    share = emit(aten.mul.Tensor, emit(aten.exp.default, wide(emit, y)), total(emit, dy, [dim % len(emit.shape(y))]))
    return emit.cast(emit(aten.sub.Tensor, dy, share), emit.dtype())


@local_program(reduction, aten.logsumexp.default)
def logsumexp(emit: Emit, x: fx.Node, dim: list[int], keepdim: bool = False) -> fx.Node:
    """Two all_reduces of the size of the result: of the maximum and of the sum of exponentials."""
    x, dims = wide(emit, x), dims_of(len(emit.shape(x)), dim)
    most = peak(emit, x, dims)
    infinite = emit(aten.eq.Scalar, emit(aten.abs.default, most), torch.inf)  # inf - inf would make a NaN of an infinite result
    most = emit(aten.masked_fill.Scalar, most, infinite, 0.0)
    exponentials = emit(aten.exp.default, emit(aten.sub.Tensor, x, most))
    y = emit(aten.add.Tensor, emit(aten.log.default, total(emit, exponentials, dims)), most)
    return emit.cast(without(emit, y, dims, keepdim), emit.dtype())


@local_program(reduction, aten.amax.default, aten.max.default)
def amax(emit: Emit, x: fx.Node, dim: Dims = None, keepdim: bool = False) -> fx.Node:
    """One all_reduce of the size of the result."""
    dims = dims_of(len(emit.shape(x)), dim)
    return emit.cast(without(emit, peak(emit, _countable(emit, x), dims), dims, keepdim), emit.dtype())


@local_program(reduction, aten.amin.default, aten.min.default)
def amin(emit: Emit, x: fx.Node, dim: Dims = None, keepdim: bool = False) -> fx.Node:
    """One all_reduce of the size of the result."""
    dims = dims_of(len(emit.shape(x)), dim)
    most = peak(emit, _countable(emit, _reversed(emit, x)), dims)
    return _reversed(emit, emit.cast(without(emit, most, dims, keepdim), emit.dtype()))


def _countable(emit: Emit, x: fx.Node) -> fx.Node:
    """Truth values as numbers, because collectives do not compare truth values."""
    return emit.cast(x, torch.uint8) if x.meta["val"].dtype == torch.bool else x


def _reversed(emit: Emit, x: fx.Node) -> fx.Node:
    """Values in the reverse order. The negative of the smallest integer is no integer, so bits are flipped."""
    return emit(aten.neg.default if x.meta["val"].is_floating_point() else aten.bitwise_not.default, x)


@local_program(reduction, aten.max.dim)
def max_and_index(emit: Emit, x: fx.Node, dim: int, keepdim: bool = False) -> tuple[fx.Node, fx.Node]:
    """Two all_reduces: of the maximum, and of the first index that has it."""
    dim = dim % len(emit.shape(x))
    most, index = _first_peak(emit, x, dim)
    return emit.cast(without(emit, most, [dim], keepdim), emit.dtype()), without(emit, index, [dim], keepdim)


@local_program(reduction, aten.min.dim)
def min_and_index(emit: Emit, x: fx.Node, dim: int, keepdim: bool = False) -> tuple[fx.Node, fx.Node]:
    """Two all_reduces: of the minimum, and of the first index that has it."""
    most, index = max_and_index(emit, _reversed(emit, x), dim, keepdim)
    return _reversed(emit, most), index


@local_program(reduction, aten.argmax.default)
def argmax(emit: Emit, x: fx.Node, dim: int | None = None, keepdim: bool = False) -> fx.Node:
    """Two all_reduces: of the maximum, and of the first index that has it."""
    ndim = len(emit.shape(x))
    if dim is not None:
        return without(emit, _first_peak(emit, x, dim % ndim)[1], [dim % ndim], keepdim)
    x, dims = _countable(emit, x), list(range(ndim))
    found = emit(aten.eq.Tensor, x, peak(emit, x, dims))
    index, stride = None, 1
    for i in reversed(dims):
        part = emit(aten.mul.Scalar, emit.positions(f"d{i}", ndim, i), stride)
        index = part if index is None else emit(aten.add.Tensor, index, part)
        stride *= emit.size_of(f"d{i}")
    return without(emit, _first(emit, index, _or_nan(emit, found, x), dims), dims, keepdim)


@local_program(reduction, aten.argmin.default)
def argmin(emit: Emit, x: fx.Node, dim: int | None = None, keepdim: bool = False) -> fx.Node:
    """Two all_reduces: of the minimum, and of the first index that has it."""
    return argmax(emit, _reversed(emit, x), dim, keepdim)


def _first_peak(emit: Emit, x: fx.Node, dim: int) -> tuple[fx.Node, fx.Node]:
    """The maximum along `dim`, and the first index that has it, both with a `dim` of size 1."""
    x = _countable(emit, x)
    here = emit(aten.max.dim, x, dim, True)
    value = emit.getitem(here, 0)
    most = emit.all_reduce(value, "max")
    found = _or_nan(emit, emit(aten.eq.Tensor, value, most), value)
    index = emit(aten.add.Tensor, emit.getitem(here, 1), emit.start_of(f"d{dim}"))
    return most, _first(emit, index, found, [dim])


def _or_nan(emit: Emit, found: fx.Node, x: fx.Node) -> fx.Node:
    """A NaN counts as the largest of all, and does not equal itself."""
    return emit(aten.logical_or.default, found, emit(aten.ne.Tensor, x, x)) if x.meta["val"].is_floating_point() else found


def _first(emit: Emit, index: fx.Node, found: fx.Node, dims: list[int]) -> fx.Node:
    """The smallest of all ranks' `index` where something was `found`."""
    here = emit(aten.where.ScalarOther, found, emit(aten.neg.default, index), -NONE)
    return emit(aten.neg.default, peak(emit, here, dims))


@local_program(reduction, aten.any.default, aten.any.dim, aten.any.dims)
def any_(emit: Emit, x: fx.Node, dim: Dims = None, keepdim: bool = False) -> fx.Node:
    """One all_reduce of the size of the result, one byte for each element."""
    dims = dims_of(len(emit.shape(x)), dim)
    true = emit.cast(emit(aten.ne.Scalar, x, 0), torch.uint8)
    return emit.cast(without(emit, peak(emit, true, dims), dims, keepdim), emit.dtype())


@local_program(reduction, aten.all.default, aten.all.dim, aten.all.dims)
def all_(emit: Emit, x: fx.Node, dim: Dims = None, keepdim: bool = False) -> fx.Node:
    """One all_reduce of the size of the result, one byte for each element."""
    dims = dims_of(len(emit.shape(x)), dim)
    false = emit.cast(emit(aten.eq.Scalar, x, 0), torch.uint8)
    return emit.cast(emit(aten.eq.Scalar, without(emit, peak(emit, false, dims), dims, keepdim), 0), emit.dtype())


@local_program(reduction, aten.prod.dim_int)
def prod(emit: Emit, x: fx.Node, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> fx.Node:
    """One all_gather of the products of the shards."""
    here = emit(aten.prod.dim_int, x, dim, True, dtype=dtype)
    gathered = emit.all_gather(here, emit.axes, dim % len(emit.shape(x)))
    return emit(aten.prod.dim_int, gathered, dim, keepdim, dtype=dtype)


@local_program(reduction, aten.prod.default)
def prod_of_all(emit: Emit, x: fx.Node, *, dtype: torch.dtype | None = None) -> fx.Node:
    """One all_gather of the products of the shards."""
    here = emit(aten.unsqueeze.default, emit(aten.prod.default, x, dtype=dtype), 0)
    return emit(aten.prod.default, emit.all_gather(here, emit.axes, 0), dtype=dtype)


def _moments(emit: Emit, x: fx.Node, dim: Dims, correction: float | None) -> tuple[fx.Node, fx.Node]:
    """Variance and mean over `dim`, whose dims have size 1 in them: an all_reduce for each."""
    x, dims = wide(emit, x), dims_of(len(emit.shape(x)), dim)
    count = 1
    for i in dims:
        count *= emit.size_of(f"d{i}")
    mean = emit(aten.div.Scalar, total(emit, x, dims), count)
    deviation = emit(aten.sub.Tensor, x, mean)
    squares = total(emit, emit(aten.mul.Tensor, deviation, deviation), dims)
    return emit(aten.div.Scalar, squares, max(count - (1 if correction is None else correction), 0.0)), mean


def _spread(root: bool, with_mean: bool) -> Callable[..., fx.Node | list[fx.Node]]:
    def program(
        emit: Emit, x: fx.Node, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
    ) -> fx.Node | list[fx.Node]:
        """Two all_reduces of the size of the result: of the mean, and of the squares of deviations from it."""
        dims = dims_of(len(emit.shape(x)), dim)
        spread, mean = _moments(emit, x, dim, correction)
        spread = emit(aten.sqrt.default, spread) if root else spread
        results = [emit.cast(without(emit, y, dims, keepdim), emit.dtype()) for y in (spread, mean)]
        return results if with_mean else results[0]

    return program


local_program(reduction, aten.var.correction)(_spread(root=False, with_mean=False))
local_program(reduction, aten.std.correction)(_spread(root=True, with_mean=False))
local_program(reduction, aten.var_mean.correction)(_spread(root=False, with_mean=True))
local_program(reduction, aten.std_mean.correction)(_spread(root=True, with_mean=True))


@local_program(reduction, aten.linalg_vector_norm.default)
def vector_norm(
    emit: Emit, x: fx.Node, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> fx.Node:
    """One all_reduce of the size of the result."""
    dims = dims_of(len(emit.shape(x)), dim)
    x = wide(emit, x if dtype is None else emit.cast(x, dtype))
    size = emit(aten.abs.default, x)
    if ord == torch.inf:
        y = peak(emit, size, dims)
    elif ord == -torch.inf:
        y = emit(aten.neg.default, peak(emit, emit(aten.neg.default, size), dims))
    elif ord == 0:
        y = total(emit, emit.cast(emit(aten.ne.Scalar, x, 0), x.meta["val"].dtype), dims)
    elif ord == 1:
        y = total(emit, size, dims)
    elif ord == 2:
        y = emit(aten.sqrt.default, total(emit, emit(aten.mul.Tensor, x, x), dims))
    else:
        y = emit(aten.pow.Tensor_Scalar, total(emit, emit(aten.pow.Tensor_Scalar, size, ord), dims), 1.0 / ord)
    return emit.cast(without(emit, y, dims, keepdim), emit.dtype())


@local_program(along(), aten.cumsum.default)
def cumsum(emit: Emit, x: fx.Node, dim: int, *, dtype: torch.dtype | None = None) -> fx.Node:
    """One all_gather of the sums of the shards; each rank adds those of the ranks before it."""
    dim = dim % len(emit.shape(x))
    wanted = emit.dtype()
    adds_in = torch.promote_types(wanted, torch.float32) if wanted.is_floating_point else wanted
    here = emit(aten.cumsum.default, emit.cast(x, adds_in), dim)
    sums = emit.all_gather(emit(aten.slice.Tensor, here, dim, -1), emit.axes, dim)
    rank = emit(aten.arange.default, emit.size(emit.axes), dtype=torch.int64, device=torch.device("cpu"))
    for new in [0] * dim + [-1] * (len(emit.shape(x)) - dim - 1):
        rank = emit(aten.unsqueeze.default, rank, new)
    later = emit(aten.ge.Tensor, rank, emit(aten.add.Tensor, emit(aten.zeros_like.default, rank), emit.coordinate(emit.axes)))
    before = emit(aten.sum.dim_IntList, emit(aten.masked_fill.Scalar, sums, later, 0), [dim], True)
    return emit.cast(emit(aten.add.Tensor, here, before), wanted)
