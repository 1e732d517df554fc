"""Local programs of layer norm and batch norm over a sharded dim: all_reduces of means, never of activations."""

import math
from collections.abc import Sequence

import torch
from torch import fx

from mpar.sharding._canonicalise import shape_of
from mpar.sharding._emit import Emit
from mpar.sharding._local_programs import argument, local_program, total, wide, without
from mpar.sharding._rules import Factors, NodeRule, tensor_operands

__all__: list[str] = []

aten = torch.ops.aten


def _layer_norm_rule(node: fx.Node) -> NodeRule:
    """The rule of a layer norm and of its gradients: it works across the last dims; gradients of weight and bias are sums over
    all others."""
    operands = tensor_operands(node)
    shape, num = shape_of(operands[0]), len(argument(node, "normalized_shape"))
    first = len(shape) - num
    names = tuple((f"d{i}",) if n > 1 else () for i, n in enumerate(shape))

    def factors(ndim: int, sizes: Sequence[int]) -> Factors:
        placed = names[first:] if ndim == num and first else names
        return tuple(name if n > 1 else () for name, n in zip(placed, sizes, strict=True))

    values = node.meta["val"]
    return NodeRule(
        operands,
        [factors(len(shape_of(o)), shape_of(o)) for o in operands],
        [() if value is None else factors(value.ndim, value.shape) for value in values],
        {f"d{i}": n for i, n in enumerate(shape)},
        replicate={name for names_of_dim in names[first:] for name in names_of_dim},
    )


def _batch_norm_rule(node: fx.Node) -> NodeRule:
    """The rule of a batch norm in training and of its gradients: it works across all dims but the channels, dim 1."""
    operands = tensor_operands(node)
    shape = shape_of(operands[0])
    training = argument(node, "training" if node.target == aten.native_batch_norm.default else "train")
    names = tuple((f"d{i}",) if n > 1 and (training or i == 1) else () for i, n in enumerate(shape))

    def factors(ndim: int) -> Factors:
        return names if ndim == len(shape) else (names[1],)

    results = [() if v is None else factors(v.ndim) if v.numel() else ((),) * v.ndim for v in node.meta["val"]]
    crossed = {name for i, names_of_dim in enumerate(names) if i != 1 for name in names_of_dim}
    sizes = {f"d{i}": n for i, n in enumerate(shape)}
    return NodeRule(operands, [factors(len(shape_of(o))) for o in operands], results, sizes, replicate=crossed)


def _statistics(emit: Emit, x: fx.Node, dims: list[int], count: int, eps: float) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Deviations from the mean, the mean and the inverse of the standard deviation: two all_reduces."""
    mean = emit(aten.div.Scalar, total(emit, x, dims), count)
    deviation = emit(aten.sub.Tensor, x, mean)
    squares = total(emit, emit(aten.mul.Tensor, deviation, deviation), dims)
    rstd = emit(aten.rsqrt.default, emit(aten.add.Scalar, emit(aten.div.Scalar, squares, count), eps))
    return deviation, mean, rstd


def _input_gradient(
    emit: Emit, g: fx.Node, normal: fx.Node, rstd: fx.Node, dims: list[int], count: int
) -> tuple[fx.Node, fx.Node, fx.Node]:
    """`rstd * (g - mean(g) - normal * mean(g * normal))`, and the sums of both means: one all_reduce."""
    sums = [emit(aten.sum.dim_IntList, value, dims, True) for value in (g, emit(aten.mul.Tensor, g, normal))]
    both = emit.all_reduce(emit(aten.stack.default, sums), "sum")
    first, second = (emit(aten.select.int, both, 0, i) for i in range(2))
    along = emit(aten.mul.Tensor, normal, emit(aten.div.Scalar, second, count))
    centred = emit(aten.sub.Tensor, emit(aten.sub.Tensor, g, emit(aten.div.Scalar, first, count)), along)
    return emit(aten.mul.Tensor, rstd, centred), first, second


@local_program(_layer_norm_rule, aten.native_layer_norm.default)
def layer_norm(
    emit: Emit, x: fx.Node, normalized_shape: list[int], weight: fx.Node | None, bias: fx.Node | None, eps: float
) -> list[fx.Node]:
    """Two all_reduces of the size of the mean."""
    ndim = len(emit.shape(x))
    dims = list(range(ndim - len(normalized_shape), ndim))
    deviation, mean, rstd = _statistics(emit, wide(emit, x), dims, math.prod(normalized_shape), eps)
    y = emit(aten.mul.Tensor, deviation, rstd)
    y = y if weight is None else emit(aten.mul.Tensor, y, weight)
    y = y if bias is None else emit(aten.add.Tensor, y, bias)
    return [emit.cast(value, emit.dtype(i)) for i, value in enumerate((y, mean, rstd))]


@local_program(_layer_norm_rule, aten.native_layer_norm_backward.default)
def layer_norm_backward(
    emit: Emit,
    dy: fx.Node,
    x: fx.Node,
    normalized_shape: list[int],
    mean: fx.Node,
    rstd: fx.Node,
    weight: fx.Node | None,
    bias: fx.Node | None,
    output_mask: list[bool],
) -> list[fx.Node | None]:
    """One all_reduce of twice the size of the mean; the gradients of weight and bias are sharded as these are."""
    first = len(emit.shape(x)) - len(normalized_shape)
    dims, others = list(range(first, len(emit.shape(x)))), list(range(first))
    dy = wide(emit, dy)
    normal = emit(aten.mul.Tensor, emit(aten.sub.Tensor, wide(emit, x), mean), rstd)
    g = dy if weight is None else emit(aten.mul.Tensor, dy, weight)
    dx = _input_gradient(emit, g, normal, rstd, dims, math.prod(normalized_shape))[0] if output_mask[0] else None
    products = (emit(aten.mul.Tensor, dy, normal) if output_mask[1] else None, dy if output_mask[2] else None)
    sums = [emit(aten.sum.dim_IntList, v, others, False) if v is not None and others else v for v in products]
    return [value if value is None else emit.cast(value, emit.dtype(i)) for i, value in enumerate((dx, *sums))]


def _channels(emit: Emit, value: fx.Node, ndim: int) -> fx.Node:
    """A vector over channels, as a tensor of `ndim` dims."""
    for new in (0, *[-1] * (ndim - 2)):
        value = emit(aten.unsqueeze.default, value, new)
    return value


def _others(emit: Emit, x: fx.Node) -> tuple[list[int], int]:
    """The dims that are not channels, and the number of elements of each channel."""
    dims = [i for i in range(len(emit.shape(x))) if i != 1]
    return dims, math.prod(emit.size_of(f"d{i}") for i in dims)


@local_program(_batch_norm_rule, aten.native_batch_norm.default)
def batch_norm(emit: Emit, x: fx.Node, weight: fx.Node | None, bias: fx.Node | None, *others: float) -> list[fx.Node]:
    """Two all_reduces of a number for each channel."""
    (dims, count), ndim = _others(emit, x), len(emit.shape(x))
    deviation, mean, rstd = _statistics(emit, wide(emit, x), dims, count, others[-1])
    y = emit(aten.mul.Tensor, deviation, rstd)
    y = y if weight is None else emit(aten.mul.Tensor, y, _channels(emit, weight, ndim))
    y = y if bias is None else emit(aten.add.Tensor, y, _channels(emit, bias, ndim))
    results = (y, without(emit, mean, dims, False), without(emit, rstd, dims, False))
    return [emit.cast(value, emit.dtype(i)) for i, value in enumerate(results)]


@local_program(_batch_norm_rule, aten.native_batch_norm_backward.default)
def batch_norm_backward(
    emit: Emit,
    dy: fx.Node,
    x: fx.Node,
    weight: fx.Node | None,
    running_mean: fx.Node | None,
    running_var: fx.Node | None,
    mean: fx.Node,
    rstd: fx.Node,
    train: bool,
    eps: float,
    output_mask: list[bool],
) -> list[fx.Node | None]:
    """One all_reduce of two numbers for each channel."""
    (dims, count), ndim = _others(emit, x), len(emit.shape(x))
    mean, rstd = _channels(emit, mean, ndim), _channels(emit, rstd, ndim)
    normal = emit(aten.mul.Tensor, emit(aten.sub.Tensor, wide(emit, x), mean), rstd)
    dx, dbias, dweight = _input_gradient(emit, wide(emit, dy), normal, rstd, dims, count)
    dx = dx if weight is None else emit(aten.mul.Tensor, dx, _channels(emit, weight, ndim))
    results = (dx, without(emit, dweight, dims, False), without(emit, dbias, dims, False))
    return [emit.cast(value, emit.dtype(i)) if output_mask[i] else None for i, value in enumerate(results)]
