"""Local programs of convolutions and windows that keep the size of a dim: a rank reads the borders of its neighbours' shards."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import fx

from mpar.sharding import _padded_ops as padded
from mpar.sharding._borders import return_borders, with_borders
from mpar.sharding._canonicalise import shape_of
from mpar.sharding._emit import Emit
from mpar.sharding._grouped import convolution_gradients, convolutions
from mpar.sharding._local_programs import argument
from mpar.sharding._rules import DIVIDED, EXPANDED, PROGRAMS, RULES, Factors, NodeRule

__all__: list[str] = []

aten = torch.ops.aten


def _image(shape: Sequence[int], kept: Sequence[int], factors: Factors) -> Factors:
    """`factors` with one for each dim behind the channels that has the same size in operand and result."""
    return (*factors[:2], *((f"s{i}",) if n > 1 and n == kept[i] else () for i, n in enumerate(shape) if i > 1))


def _convolution(node: fx.Node) -> NodeRule:
    """The rule of convolutions to whose operand zeros are added. Dims that keep their size are sharded too."""
    rule, x, y = convolutions(node), shape_of(node.args[0]), shape_of(node)
    rule.factors, rule.results = [_image(x, y, rule.factors[0]), *rule.factors[1:]], [_image(y, x, rule.results[0])]
    rule.sizes = rule.sizes | {f"s{i}": n for i, n in enumerate(x) if i > 1 and n == y[i]}
    rule.localise = None  # no argument of these ops holds a size
    return rule


def _convolution_backward(node: fx.Node) -> NodeRule:
    """The rule of the gradients of such convolutions. Those of weight and bias are sums over the dims that keep their size."""
    rule, dy, x = convolution_gradients(node), shape_of(node.args[0]), shape_of(node.args[1])
    of_dy, of_x, *others = rule.factors
    rule.factors = [_image(dy, x, of_dy), _image(x, dy, of_x), *others]
    rule.results = [_image(x, dy, rule.results[0]) if rule.results[0] else (), *rule.results[1:]]
    rule.sizes = rule.sizes | {f"s{i}": n for i, n in enumerate(x) if i > 1 and n == dy[i]}
    rule.localise = None
    return rule


def _windows(node: fx.Node) -> NodeRule:
    """The rule of windows around every place of a dim."""
    x = node.args[0]
    names = tuple((f"d{i}",) if n > 1 else () for i, n in enumerate(shape_of(x)))
    linear = {0} if not argument(node, "value") else set()
    return NodeRule([x], [names], [(*names, ())], {f"d{i}": n for i, n in enumerate(shape_of(x))}, linear=linear)


def _windows_backward(node: fx.Node) -> NodeRule:
    """The rule of the gradient of windows."""
    dy = node.args[0]
    names = tuple((f"d{i}",) if n > 1 else () for i, n in enumerate(shape_of(node)))
    return NodeRule([dy], [(*names, ())], [names], {f"d{i}": n for i, n in enumerate(shape_of(node))}, linear={0})


class _Padding:
    """How a rank adds rows around those of its shard: along sharded dims from its neighbours, else by the op, or by a pad before
    it where the sides differ."""

    def __init__(self, emit: Emit, before: Sequence[int], after: Sequence[int]) -> None:
        self.emit, self.before, self.after = emit, before, after
        self.axes = [emit.order_of(f"s{2 + i}") for i in range(len(before))]
        self.sharded = [i for i, axes in enumerate(self.axes) if axes and before[i] + after[i]]
        self.by_op = [0 if i in self.sharded else min(sides) for i, sides in enumerate(zip(before, after, strict=True))]
        self.first, self.last = (
            [0 if i in self.sharded else n - self.by_op[i] for i, n in enumerate(side)] for side in (before, after)
        )

    def add(self, x: fx.Node) -> fx.Node:
        """`x` with the rows that the op does not add itself."""
        if any(self.first + self.last):
            x = self.emit(aten.constant_pad_nd.default, x, padded.pads_of(self.first, self.last))
        if self.sharded:
            self.emit.opaque()
        for i in self.sharded:
            x = with_borders(self.emit, x, 2 + i, self.axes[i], self.before[i], self.after[i], 0)
        return x

    def remove(self, x: fx.Node) -> fx.Node:
        """The transpose of `add`."""
        for i in reversed(self.sharded):
            x = return_borders(self.emit, x, 2 + i, self.axes[i], self.before[i], self.after[i])
        pads = padded.cut(self.first, self.last)
        return self.emit(aten.constant_pad_nd.default, x, pads) if any(pads) else x


def convolution(
    emit: Emit, x: fx.Node, weight: fx.Node, bias: fx.Node | None, before: list[int], after: list[int], dilation: list[int]
) -> fx.Node:
    """Two messages for each sharded dim, of the rows that windows have beyond the shard."""
    padding, num = _Padding(emit, before, after), len(before)
    groups, x = emit.shape(x)[1] // emit.shape(weight)[1], padding.add(x)
    given = ([1] * num, padding.by_op, dilation, False, [0] * num, groups)
    return emit(aten.convolution.default, x, weight, bias, *given)


def convolution_backward(emit: Emit, dy: fx.Node, x: fx.Node, weight: fx.Node, *window: list) -> list:
    """Two messages for each sharded dim and for each of operand and gradient, of the rows that windows have beyond the shard."""
    before, after, dilation, mask = window
    padding, num = _Padding(emit, before, after), len(before)
    groups, bias = emit.shape(x)[1] // emit.shape(weight)[1], [emit.shape(weight)[0]]
    given = (bias, [1] * num, padding.by_op, dilation, False, [0] * num, groups, mask)
    gradients = emit(aten.convolution_backward.default, dy, padding.add(x), weight, *given)
    dx, *others = (emit.getitem(gradients, i) if asked else None for i, asked in enumerate(mask))
    return [dx if dx is None else padding.remove(dx), *(None if each is None else emit.pending(each) for each in others)]


def windows(emit: Emit, x: fx.Node, dim: int, size: int, before: int, after: int, value: float) -> fx.Node:
    """Two messages, of the rows that windows have beyond the shard."""
    axes, last = emit.order_of(f"d{dim}"), [0] * (len(emit.shape(x)) - 1 - dim)
    if axes:
        emit.opaque()
        x = with_borders(emit, x, dim, axes, before, after, value)
    else:
        x = emit(aten.constant_pad_nd.default, x, padded.pads_of([before, *last], [after, *last]), value)
    return emit(aten.unfold.default, x, dim, size, 1)


def windows_backward(emit: Emit, dy: fx.Node, dim: int, size: int, before: int, after: int) -> fx.Node:
    """Two messages, of the rows that windows have beyond the shard."""
    axes, shape = emit.order_of(f"d{dim}"), list(emit.shape(dy)[:-1])
    shape[dim] += before + after
    if axes:
        emit.opaque()
    dx = emit(aten.unfold_backward.default, dy, shape, dim, size, 1)
    if axes:
        return return_borders(emit, dx, dim, axes, before, after)
    dx = emit.stated(dx, *(emit.order_of(f"d{i}") for i in range(len(shape))), partial=emit.partial(dy))
    last = [0] * (len(shape) - 1 - dim)
    return emit(aten.constant_pad_nd.default, dx, padded.cut([before, *last], [after, *last]))


def _define(op: Callable, rule: Callable[[fx.Node], NodeRule], crossed: Callable[[fx.Node], set[str]], program: Callable) -> None:
    """Give an op a rule, and the program by which it works across the factors `crossed`."""

    def across(node: fx.Node) -> NodeRule:
        found = rule(node)
        return replace(found, replicate=crossed(node) & found.shardable)

    RULES[op], PROGRAMS[op] = rule, (across, program)
    EXPANDED.add(op)
    DIVIDED.add(op)


def _beside(node: fx.Node) -> set[str]:
    """The factors of the dims to which a convolution adds rows."""
    sides = zip(argument(node, "before"), argument(node, "after"), strict=True)
    return {f"s{2 + i}" for i, (first, last) in enumerate(sides) if first + last}


def _along(node: fx.Node) -> set[str]:
    """The factor of the dim of windows."""
    return {f"d{argument(node, 'dim')}"}


_define(padded.convolution, _convolution, _beside, convolution)
_define(padded.convolution_backward, _convolution_backward, _beside, convolution_backward)
_define(padded.windows, _windows, _along, windows)
_define(padded.windows_backward, _windows_backward, _along, windows_backward)
