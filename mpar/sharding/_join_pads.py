"""Join pads: a pad and the convolution or the windows that read it become one op, if the result has the size that was padded."""

from collections.abc import Callable, Sequence

import torch
from torch import fx

from mpar.sharding import _padded_ops as padded
from mpar.sharding._canonicalise import call_like, labels_of, shape_of
from mpar.sharding._pass import graph_pass
from mpar.sharding._windows import window_of

__all__ = ["join_pads"]

aten = torch.ops.aten
Sides = tuple[list[int], list[int]]
"""For each dim how many rows are added before those that there are, and after."""


@graph_pass
def join_pads(graph: fx.Graph) -> dict[str, int]:
    """Replace convolutions of stride 1 and windows of step 1 that keep the size of a dim to which rows are added.

    before:  %p = constant_pad_nd(%x, [3, 0]); %y = convolution(%p, %w, None, [1], ...)      # %x: [8, 16, 32], %w: [16, 1, 4]
    after:   %y = padded.convolution(%x, %w, None, [3], [0], [1])

    A gradient becomes one op with the cut that follows it. Zeros may also be added on both sides by the convolution itself, and
    rows of its result be cut off.
    """
    joined = 0
    for node in list(graph.nodes):
        if node.target in JOINS:
            joined += JOINS[node.target](graph, node)
    return {"pads_joined": joined}


def _convolution(graph: fx.Graph, node: fx.Node) -> bool:
    x, weight, bias, *window = node.args
    source, sides = _padding(x, *window[:2])
    result = node
    if len(node.users) == 1 and (cut := window_of(next(iter(node.users)))) is not None and max(cut.before, cut.after) <= 0:
        result, sides = next(iter(node.users)), _narrowed(sides, cut.dim, -cut.before, -cut.after)
    if not _can_join(source, result, sides, window):
        return False
    before, after = (side[2:] for side in sides)
    _replace(graph, result, padded.convolution, (source, weight, bias, before, after, _each(window[2], len(before))))
    return True


def _convolution_backward(graph: fx.Graph, node: fx.Node) -> bool:
    dy, x, weight, _, *window, mask = node.args
    source, sides = _padding(x, *window[:2])
    zeros = window_of(dy)
    if zeros is not None and min(zeros.before, zeros.after) >= 0 and not zeros.value:
        dy, sides = zeros.source, _narrowed(sides, zeros.dim, zeros.before, zeros.after)
    if not _can_join(source, dy, sides, window):
        return False
    of_x = [user for user in node.users if user.args[1] == 0]
    cuts = [user for found in of_x for user in found.users] if source is not x else []
    if not all(_cuts(user, _pad(x)[1]) for user in cuts):
        return False
    before, after = (side[2:] for side in sides)
    args = (dy, source, weight, before, after, _each(window[2], len(before)), mask)
    new = _replace(graph, node, padded.convolution_backward, args)
    for found in of_x:
        found.meta = {**found.meta, "val": new.meta["val"][0]}
    for user in cuts:
        user.replace_all_uses_with(user.args[0])
    return True


def _unfold(graph: fx.Graph, node: fx.Node) -> bool:
    x, dim, size, step = node.args
    source, sides, value = _pad(x)
    if source is x or step != 1 or not _only_along(dim, sides) or shape_of(source)[dim] != shape_of(node)[dim]:
        return False
    dim %= len(shape_of(x))
    _replace(graph, node, padded.windows, (source, dim, size, sides[0][dim], sides[1][dim], value))
    return True


def _unfold_backward(graph: fx.Graph, node: fx.Node) -> bool:
    dy, shape, dim, size, step = node.args
    users = list(node.users)
    if step != 1 or not users or users[0].target != aten.constant_pad_nd.default:
        return False
    sides = padded.sides_of([-n for n in users[0].args[1]], len(shape))
    fits = _only_along(dim, sides) and shape_of(users[0])[dim] == shape_of(dy)[dim]
    if not fits or not all(_cuts(user, sides) for user in users):
        return False
    dim %= len(shape)
    new = _replace(graph, node, padded.windows_backward, (dy, dim, size, sides[0][dim], sides[1][dim]))
    for user in users:
        user.replace_all_uses_with(new)
    return True


def _padding(x: fx.Node, stride: Sequence[int], padding: Sequence[int]) -> tuple[fx.Node, Sides]:
    """What a convolution, or its gradient, reads before zeros are added, by a pad and by itself, and how many are."""
    own = [0, 0, *_each(padding, len(shape_of(x)) - 2)]
    source, sides, value = _pad(x)
    if value != 0 or any(sides[0][:2]) or any(sides[1][:2]):
        return x, (own, own)
    before, after = ([a + b for a, b in zip(own, side, strict=True)] for side in sides)
    return source, (before, after)


def _narrowed(sides: Sides, dim: int, before: int, after: int) -> Sides:
    """How many rows have to be added for a result without so many of its first and last rows along `dim`."""
    first, last = (list(side) for side in sides)
    first[dim] -= before
    last[dim] -= after
    return first, last


def _can_join(source: fx.Node, result: fx.Node, sides: Sides, window: Sequence) -> bool:
    """Whether a convolution has stride 1, cuts no rows off, and keeps the size of a dim to which rows are added."""
    stride, _, _, transposed, *_ = window
    if min(map(min, sides)) < 0 or any(sides[0][:2]) or any(sides[1][:2]):
        return False
    dims = list(zip(shape_of(source), shape_of(result), *sides, strict=True))[2:]
    keeps = any(1 < size == kept and first + last > 0 for size, kept, first, last in dims)
    return keeps and not transposed and all(n == 1 for n in stride)


def _each(sizes: Sequence[int], num: int) -> list[int]:
    return list(sizes) * num if len(sizes) == 1 else list(sizes)


def _pad(node: fx.Node) -> tuple[fx.Node, Sides, float]:
    """What a pad reads, its sides, and what it adds; the node itself, and no rows, if it is no pad, or one that cuts rows off."""
    ndim = len(shape_of(node))
    if node.target != aten.constant_pad_nd.default or min(node.args[1]) < 0:
        return node, ([0] * ndim, [0] * ndim), 0
    return node.args[0], padded.sides_of(node.args[1], ndim), node.args[2] if len(node.args) > 2 else 0


def _cuts(node: fx.Node, sides: Sides) -> bool:
    """Whether a node cuts off what a pad with these sides has added."""
    return node.target == aten.constant_pad_nd.default and padded.sides_of([-n for n in node.args[1]], len(sides[0])) == sides


def _only_along(dim: int, sides: Sides) -> bool:
    """Whether rows are added along one dim only."""
    dim %= len(sides[0])
    return min(map(min, sides)) >= 0 and all(i == dim or not a + b for i, (a, b) in enumerate(zip(*sides, strict=True)))


def _replace(graph: fx.Graph, node: fx.Node, target: Callable, args: tuple) -> fx.Node:
    with graph.inserting_before(node):
        new = call_like(graph, node, target, args)
    new.meta["labels"] = labels_of(node)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return new


JOINS = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.unfold.default: _unfold,
    aten.unfold_backward.default: _unfold_backward,
}
