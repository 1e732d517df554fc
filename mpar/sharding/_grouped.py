"""Grouped: rules of ops whose channels come in groups, convolutions and group norms. Groups are independent of each other.

A dim of channels is made of the groups and of the channels of a group, which stay together.
"""

from collections.abc import Sequence

import torch
from torch import fx

from mpar.sharding._canonicalise import shape_of
from mpar.sharding._local_programs import argument
from mpar.sharding._pass_through import Localise, Pattern, named_operands, values_of
from mpar.sharding._rules import RULES, Factors, NodeRule

__all__ = ["convolution_gradients", "convolutions"]

aten = torch.ops.aten
Dims = list[tuple[str, ...]]
"""The factors of the first dims of a tensor; its other dims have none."""


def _rule(node: fx.Node, operands: dict[str, Dims], results: list[Dims], sizes: dict[str, int], linear: set[str]) -> NodeRule:
    """The rule of an op whose tensors have these factors; those but the batch and the groups are not sharded."""

    def factors(dims: Dims, shape: Sequence[int]) -> Factors:
        every = [*dims, *[()] * (len(shape) - len(dims))]
        return tuple(tuple(name for name in names if sizes[name] > 1) for names in every)

    named = named_operands(node)
    return NodeRule(
        [operand for _, operand in named],
        [factors(operands[name], shape_of(operand)) for name, operand in named],
        [() if v is None else factors(dims, v.shape) for v, dims in zip(values_of(node), results, strict=True)],
        {name: size for name, size in sizes.items() if size > 1},
        {name for name, size in sizes.items() if name not in ("b", "g") and size > 1},
        {i for i, (name, _) in enumerate(named) if name in linear},
    )


def _replaced(node: fx.Node, args: tuple, **new: object) -> tuple:
    """`args` of the op of `node` with other values for the arguments that `new` names."""
    known = [known.name for known in node.target._schema.arguments]  # type: ignore[union-attr]
    return tuple(new.get(name, value) for name, value in zip(known, args, strict=False))


def _transposed(node: fx.Node) -> bool:
    """Whether a convolution is transposed; one of `_padded_ops` never is."""
    return node.target in (aten.convolution.default, aten.convolution_backward.default) and argument(node, "transposed")


def _channels(node: fx.Node, x: fx.Node, y: fx.Node) -> tuple[dict[str, int], Dims]:
    """The sizes of the batch, of groups, and of the channels of a group on both sides, in a convolution from `x` to `y`; and the
    factors of its weight. Shapes tell the groups: the argument may count those of one rank."""
    fixed = shape_of(argument(node, "weight"))[1]
    if _transposed(node):
        groups = shape_of(y)[1] // fixed
        weight: Dims = [("g", "i"), ("o",)]
    else:
        groups = shape_of(x)[1] // fixed
        weight = [("g", "o"), ("i",)]
    return {"b": shape_of(x)[0], "g": groups, "i": shape_of(x)[1] // groups, "o": shape_of(y)[1] // groups}, weight


def convolutions(node: fx.Node) -> NodeRule:
    """The rule of convolutions. Without groups the input's channels are contracted; with a bias, no part of them can be summed
    alone."""
    bias = argument(node, "bias") is not None
    linear = {"input", "weight"} if not bias else set()
    sizes, of_weight = _channels(node, argument(node, "input"), node)
    if sizes["g"] == 1:
        inner = "_" if bias else "i"
        weight = f"{inner} o *" if _transposed(node) else f"o {inner} *"
        return Pattern(f"b {inner} *, {weight}, o -> b o *", linear=" ".join(linear))(node)
    operands: dict[str, Dims] = {"input": [("b",), ("g", "i")], "weight": of_weight, "bias": [("g", "o")]}
    rule = _rule(node, operands, [[("b",), ("g", "o")]], sizes, linear)

    def localise(args: tuple, kwargs: dict, shapes: list[tuple[int, ...]]) -> tuple[tuple, dict]:
        return _replaced(node, args, groups=shapes[0][1] // sizes["o"]), kwargs

    rule.localise = localise
    return rule


def convolution_gradients(node: fx.Node) -> NodeRule:
    """The rule of the gradients of a convolution: that of a weight or bias is a sum over the batch.

    That of a bias does not depend on the input's channels, so these cannot be sharded if it is asked for, unless they are groups.
    """
    sizes, channels = _channels(node, argument(node, "input"), argument(node, "grad_output"))
    inner = "_" if argument(node, "output_mask")[2] else "i"
    weight = f"{inner} o *" if _transposed(node) else f"o {inner} *"
    if sizes["g"] == 1:
        rule = Pattern(f"b o *, b {inner} *, {weight} -> b {inner} *, {weight}, o", linear="grad_output")(node)
        rule.localise = _local_gradients(node, {})
        return rule
    of_x: Dims = [("b",), ("g", "i")]
    operands = {"grad_output": [("b",), ("g", "o")], "input": of_x, "weight": channels}
    rule = _rule(node, operands, [of_x, channels, [("g", "o")]], sizes, {"grad_output"})
    rule.localise = _local_gradients(node, sizes)
    return rule


def _local_gradients(node: fx.Node, sizes: dict[str, int]) -> Localise:
    """Puts the local size of the bias, and the number of local groups if `sizes` has that of a group, into arguments."""

    def localise(args: tuple, kwargs: dict, shapes: list[tuple[int, ...]]) -> tuple[tuple, dict]:
        new: dict[str, object] = {}
        if sizes:
            of_weight = sizes["i"] if _transposed(node) else sizes["o"]
            counts = [(shapes[0][1:2], sizes["i"]), (shapes[1][:1], of_weight), (shapes[2][:1], sizes["o"])]
            new["groups"] = next(channels[0] // size for channels, size in counts if channels)
        if argument(node, "bias_sizes") and shapes[2]:
            new["bias_sizes"] = list(shapes[2])
        return _replaced(node, args, **new), kwargs

    return localise


def _group_norm(node: fx.Node) -> NodeRule:
    """The rule of a group norm and of its gradients; those of weight and bias are sums over the batch."""
    x, of_group = shape_of(argument(node, "input")), argument(node, "C") // argument(node, "group")
    sizes = {"b": x[0], "g": x[1] // of_group, "c": of_group}  # shapes tell the groups: the argument may count those of one rank
    image: Dims = [("b",), ("g", "c")]
    statistics: Dims = [("b",), ("g",)]
    vector: Dims = [("g", "c")]
    operands = {"grad_out": image, "input": image, "mean": statistics, "rstd": statistics, "weight": vector, "bias": vector}
    backward = node.target == aten.native_group_norm_backward.default
    rule = _rule(node, operands, [image, vector, vector] if backward else [image, statistics, statistics], sizes, set())

    def localise(args: tuple, kwargs: dict, shapes: list[tuple[int, ...]]) -> tuple[tuple, dict]:
        if not shapes[0]:  # no gradient of the input: what is asked for says the channels, and the batch stays whole
            local = next(shape[0] for shape in shapes if shape)
            return _replaced(node, args, C=local, group=local // sizes["c"]), kwargs
        return _replaced(node, args, N=shapes[0][0], C=shapes[0][1], group=shapes[0][1] // sizes["c"]), kwargs

    if backward and values_of(node)[0] is None:
        rule.replicate |= {"b"} & rule.sizes.keys()
    rule.localise = localise
    return rule


RULES.update(
    {
        aten.convolution.default: convolutions,
        aten.convolution_backward.default: convolution_gradients,
        aten.native_group_norm.default: _group_norm,
        aten.native_group_norm_backward.default: _group_norm,
    }
)
