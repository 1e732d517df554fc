"""Padded ops: ops of logical graphs that work on windows around every place of a dim, and give a result for every place.

Torch writes such an op as a pad, whose size no mesh axis divides, and a convolution or an `unfold` of that. As one op it keeps
the size of the dim, so the dim may be sharded. A rank graph has none of them: each becomes ops of torch on a shard with its
borders.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["convolution", "convolution_backward", "cut", "pads_of", "sides_of", "windows", "windows_backward"]

aten = torch.ops.aten
_LIBRARY = torch.library.Library("mpar_padded", "DEF")


def _define(schema: str) -> Callable[[Callable], Callable]:
    """Define an op of this library that computes what the function does."""

    def register(fn: Callable) -> Callable:
        name = schema.partition("(")[0]
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, fn, "CompositeExplicitAutograd")
        return getattr(torch.ops.mpar_padded, name).default

    return register


def pads_of(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """What `constant_pad_nd` takes to add so many rows before and after those of the last dims."""
    return [n for sides in reversed(list(zip(before, after, strict=True))) for n in sides]


def sides_of(pad: Sequence[int], ndim: int) -> tuple[list[int], list[int]]:
    """How many rows `constant_pad_nd` adds before and after those of each of `ndim` dims if it takes this."""
    missing = [0] * (ndim - len(pad) // 2)
    return [*missing, *pad[::2][::-1]], [*missing, *pad[1::2][::-1]]


def cut(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """What `constant_pad_nd` takes to cut them off again."""
    return [-n for n in pads_of(before, after)]


@_define("convolution(Tensor input, Tensor weight, Tensor? bias, SymInt[] before, SymInt[] after, SymInt[] dilation) -> Tensor")
def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, before: list[int], after: list[int], dilation: list[int]
) -> Tensor:
    """A convolution of stride 1 of `x` with zeros around it."""
    num, groups = len(dilation), x.shape[1] // weight.shape[1]
    padded = aten.constant_pad_nd(x, pads_of(before, after))
    return aten.convolution(padded, weight, bias, [1] * num, [0] * num, dilation, False, [0] * num, groups)


@_define(
    "convolution_backward(Tensor grad_output, Tensor input, Tensor weight, SymInt[] before, SymInt[] after, SymInt[] dilation, "
    "bool[3] output_mask) -> (Tensor, Tensor, Tensor)"
)
def convolution_backward(
    dy: Tensor, x: Tensor, weight: Tensor, before: list[int], after: list[int], dilation: list[int], output_mask: list[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients of `convolution` by its tensors."""
    num, groups = len(dilation), x.shape[1] // weight.shape[1]
    padded, sizes = aten.constant_pad_nd(x, pads_of(before, after)), [weight.shape[0]]
    dx, *others = aten.convolution_backward(
        dy, padded, weight, sizes, [1] * num, [0] * num, dilation, False, [0] * num, groups, output_mask
    )
    return (None if dx is None else aten.constant_pad_nd(dx, cut(before, after)), *others)


@_define("windows(Tensor self, int dim, SymInt size, SymInt before, SymInt after, Scalar value) -> Tensor")
def windows(x: Tensor, dim: int, size: int, before: int, after: int, value: float) -> Tensor:
    """For each place of `dim` the `size` places of which it is number `before`, as a last dim; `value` beyond the ends."""
    last = [0] * (x.ndim - 1 - dim)
    return aten.constant_pad_nd(x, pads_of([before, *last], [after, *last]), value).unfold(dim, size, 1).clone()


@_define("windows_backward(Tensor grad_in, int dim, SymInt size, SymInt before, SymInt after) -> Tensor")
def windows_backward(dy: Tensor, dim: int, size: int, before: int, after: int) -> Tensor:
    """The gradient of `windows`: the sum over all windows that have a place."""
    shape, last = list(dy.shape[:-1]), [0] * (dy.ndim - 2 - dim)
    shape[dim] += before + after
    return aten.constant_pad_nd(aten.unfold_backward(dy, shape, dim, size, 1), cut([before, *last], [after, *last]))
