"""Op uses: what the ops of a rank graph cost, equal ones counted, from which the time of a kind is predicted."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, fx

from mpar.ir import OpUse
from mpar.ops import primitive_of
from mpar.sharding import node_cost

__all__ = ["count_ops"]


def count_ops(nodes: Iterable[fx.Node]) -> tuple[OpUse, ...]:
    """What each node costs on one rank, in order of first use. Views, inputs and collectives cost nothing and are left out."""
    uses = Counter(use for node in nodes if (use := _op_use(node)).bytes or use.flops)
    return tuple(replace(use, calls=calls) for use, calls in uses.items())


def _op_use(node: fx.Node) -> OpUse:
    cost, primitive = node_cost(node), primitive_of(node.target)
    name = "" if primitive is None else primitive.name
    return OpUse(cost.flops, cost.bytes, _dtype_name(node), name, cost.transcendentals, cost.matmul, cost.attention)


def _dtype_name(node: fx.Node) -> str:
    """The narrowest floating dtype among the operands of a node, or its own if it has none: "bfloat16"."""
    values = [used.meta.get("val") for used in node.all_input_nodes] or [node.meta.get("val")]
    dtypes = [value.dtype for value in values if isinstance(value, Tensor) and value.dtype.is_floating_point]
    return str(min(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)).removeprefix("torch.")
