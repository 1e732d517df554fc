"""Reuse: elementwise ops write over an operand that nothing reads again, instead of into new memory.

This lowers the peak. On a CPU it also saves time: the page faults of new memory cost more than the arithmetic of a short op.
"""

from typing import Any

import torch
from torch import Tensor, fx

from mpar import tree
from mpar.ops import PRIMITIVES
from mpar.sharding import graph_pass
from mpar.torch_private import storage_key

__all__ = ["IN_PLACE", "is_last_reader", "is_sole_user", "overwrite_operands", "reuse_operands"]

aten = torch.ops.aten
IN_PLACE = {aten.add.Tensor: aten.add_.Tensor, aten.mul.Tensor: aten.mul_.Tensor}
"""These ops are commutative to the bit, so either operand may be the one that is written over."""
_UNARY = (
    "abs",
    "cos",
    "erf",
    "exp",
    "gelu",
    "log",
    "neg",
    "reciprocal",
    "relu",
    "rsqrt",
    "sigmoid",
    "silu",
    "sin",
    "sqrt",
    "tanh",
)
OVER_FIRST = {getattr(aten, name).default: getattr(aten, f"{name}_").default for name in _UNARY} | {
    aten.div.Tensor: aten.div_.Tensor,
    aten.masked_fill.Scalar: aten.masked_fill_.Scalar,
    aten.pow.Tensor_Scalar: aten.pow_.Scalar,
    aten.sub.Tensor: aten.sub_.Tensor,
    PRIMITIVES["einsum_add"].op: PRIMITIVES["einsum_add_over"].op,
}
"""Ops that may write over their first operand only. Both forms take the same operands and give the same bits."""
OVER_GRADIENT = {
    op.default: op.grad_input
    for op in (aten.gelu_backward, aten.sigmoid_backward, aten.silu_backward, aten.tanh_backward, aten.threshold_backward)
}
"""The same for derivatives of elementwise ops, whose first operand is a gradient: these forms are told where to write."""


@graph_pass
def reuse_operands(graph: fx.Graph) -> dict[str, int]:
    """Compute elementwise ops in place where an operand is an intermediate whose storage nothing else reads, so that sums chain.

    before:  %a = einsum(%x, %w); %y = add(%a, %r); %z = add(%y, %x)
    after:   %a = einsum(%x, %w); %y = add_(%a, %r); %z = add_(%y, %x)

    The law: a node may write over an operand if each value in the operand's storage is computed by an op of the graph and has one
    reader. Such values form a line: the op that made the storage, then views of the value before and sums that were written over
    it, up to the operand, whose one reader is the node. So whatever else the graph does, and in whatever order, it never reads
    this storage: the line has no second branch. That bars

    - operands of the graph and constants, and views of them, because no op of the graph made their storage;
    - results of the graph, and what shares a storage with one, because the output is then a second reader: of the result, or of a
      value from which both come. State that `write_state` overwrites is among both the operands and the results;
    - what a message carries, which both the op that posts it and `arrived` read;
    - a sum of a value and of a view of it, because the value has two readers.

    A value without data must share a storage with another exactly if the values will share one. So the views of a sum that is
    written over an operand are moved to that operand's storage; the forecast of memory follows from the same storages.
    """
    holders = _holders(graph)
    reused = 0
    for node in graph.nodes:
        for target in _candidates(node):
            if _fits(target, node) and _is_line(holders[storage_key(target.meta["val"])]):
                _put_in_place(node, target)
                _write_over(node, target, holders)
                reused += 1
                break
    return {"operands_reused": reused}


@graph_pass
def overwrite_operands(graph: fx.Graph) -> dict[str, int]:
    """Add and multiply into the first operand where it is an operand of the graph, which the caller then does not read again.

    The compiler uses this for sums to which one term after another is added.

    before:  %y = add(%sum, %term)
    after:   %y = add_(%sum, %term)
    """
    holders = _holders(graph)
    overwritten = 0
    for node in graph.nodes:
        if node.target not in IN_PLACE or node.kwargs or len(node.args) != 2:
            continue
        target = node.args[0]
        if isinstance(target, fx.Node) and target.op == "placeholder" and list(target.users) == [node] and _fits(target, node):
            node.target = IN_PLACE[node.target]
            _write_over(node, target, holders)
            overwritten += 1
    return {"operands_overwritten": overwritten}


def is_last_reader(operand: object, node: fx.Node) -> bool:
    """Whether `operand` is computed by an op of the graph, and only `node` reads it."""
    return isinstance(operand, fx.Node) and operand.op == "call_function" and list(operand.users) == [node]


def is_sole_user(graph: fx.Graph, node: fx.Node) -> bool:
    """Whether the node's value fills its storage, and no value of another node lies in that storage."""
    value = node.meta["val"]
    alone = sum(storage_key(value) in _storages(other) for other in graph.nodes) == 1
    return alone and value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes


def _candidates(node: fx.Node) -> list[fx.Node]:
    """The operands of an op over which a form of it can write."""
    if node.target in IN_PLACE and not node.kwargs:
        operands = node.args
    elif node.target in OVER_FIRST or node.target in OVER_GRADIENT:
        operands = node.args[:1]
    else:
        return []
    return [operand for operand in operands if isinstance(operand, fx.Node)]


def _put_in_place(node: fx.Node, target: fx.Node) -> None:
    """Replace an op by the form of it that writes over its operand `target`."""
    if node.target in IN_PLACE:
        node.args = (target, *(operand for operand in node.args if operand is not target))
        node.target = IN_PLACE[node.target]
    elif node.target in OVER_FIRST:
        node.target = OVER_FIRST[node.target]
    else:
        node.target, node.kwargs = OVER_GRADIENT[node.target], node.kwargs | {"grad_input": target}


def _fits(target: fx.Node, node: fx.Node) -> bool:
    """Whether `node` may write its result over its operand `target`: they have the same shape, dtype and strides, `target` fills
    its storage, and is not an operand of `node` twice."""
    value, result = target.meta["val"], node.meta["val"]
    if node.args.count(target) > 1 or (value.shape, value.dtype, value.stride()) != (result.shape, result.dtype, result.stride()):
        return False
    return value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes


def _holders(graph: fx.Graph) -> dict[int, list[fx.Node]]:
    """By storage the nodes whose values lie in it, or have items that do."""
    holders: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        for key in {storage_key(value) for value in tree.leaves(node.meta.get("val")) if isinstance(value, Tensor)}:
            holders.setdefault(key, []).append(node)
    return holders


def _is_line(holders: list[fx.Node]) -> bool:
    """Whether each value in a storage is computed by an op of the graph and has one reader. `holders` are the nodes whose values
    lie there. Those of tuples do not count, for the nodes of their items are there too."""
    values = [node for node in holders if isinstance(node.meta["val"], Tensor)]
    return all(node.op == "call_function" and len(node.users) == 1 for node in values)


def _write_over(node: fx.Node, target: fx.Node, holders: dict[int, list[fx.Node]]) -> None:
    """Let the value of `node`, and all values that share a storage with it, lie in the storage of `target` instead."""
    old, new = storage_key(node.meta["val"]), storage_key(target.meta["val"])
    for holder in holders[old]:
        holder.meta = holder.meta | {"val": _moved(holder.meta["val"], old, target.meta["val"].untyped_storage())}
    holders[new] += holders.pop(old)


def _moved(value: Any, old: int, storage: torch.UntypedStorage) -> Any:
    """`value`, whose tensors that lie in the storage `old` lie at the same places of `storage` instead."""
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(item, old, storage) for item in value)
    if not isinstance(value, Tensor) or storage_key(value) != old:
        return value
    empty = torch.empty(0, dtype=value.dtype, device="meta")
    return empty.set_(storage, value.storage_offset(), value.shape, value.stride())


def _storages(node: fx.Node) -> set[int]:
    """The storage that a node's value lives in; empty for a node whose value is a tuple, for the nodes of its items have them."""
    value = node.meta.get("val")
    return {storage_key(value)} if isinstance(value, Tensor) else set()
