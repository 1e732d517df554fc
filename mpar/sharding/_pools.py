"""Pools: rules of average pools. Windows that lie side by side are independent: no shard needs a row of another."""

import torch
from torch import fx

from mpar.sharding._canonicalise import shape_of
from mpar.sharding._local_programs import argument
from mpar.sharding._pass_through import named_operands
from mpar.sharding._rules import RULES, Factors, NodeRule

__all__: list[str] = []

aten = torch.ops.aten


def _average(node: fx.Node) -> NodeRule:
    """The rule of average pools and of their gradients. A dim is made of windows and of their rows, which stay together; it
    cannot be sharded if windows overlap, or leave rows out or add some."""
    x = shape_of(argument(node, "self"))
    kernel, stride, padding = (list(argument(node, name) or []) for name in ("kernel_size", "stride", "padding"))
    num = 3 if node.target in (aten.avg_pool3d.default, aten.avg_pool3d_backward.default) else 2
    kernel, padding = (sizes * num if len(sizes) == 1 else sizes for sizes in (kernel, padding))
    stride = stride * num if len(stride) == 1 else stride or kernel
    sizes: dict[str, int] = {}
    whole: list[tuple[str, ...]] = []
    pooled: list[tuple[str, ...]] = []
    first = len(x) - num
    for i, n in enumerate(x):
        rows = 1 if i < first else kernel[i - first]
        apart = i < first or (stride[i - first] == rows and not padding[i - first] and n % rows == 0)
        named = {f"d{i}": n // rows, f"row{i}": rows} if apart else {}
        named = {name: size for name, size in named.items() if size > 1}
        sizes |= named
        whole.append(tuple(named))
        pooled.append(tuple(name for name in named if name == f"d{i}"))
    backward = node.target in (aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
    factors: dict[str, Factors] = {"self": tuple(whole), "grad_output": tuple(pooled)}
    operands = named_operands(node)
    return NodeRule(
        [operand for _, operand in operands],
        [factors[name] for name, _ in operands],
        [factors["self" if backward else "grad_output"]],
        sizes,
        {name for name in sizes if name.startswith("row")},
        {0},
    )


for _op in (aten.avg_pool2d, aten.avg_pool2d_backward, aten.avg_pool3d, aten.avg_pool3d_backward):
    RULES[_op.default] = _average
