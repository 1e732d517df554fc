"""Decompose: ops of torch that have no sharding rule become ops that have one, where torch itself defines them so."""

from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from mpar.sharding._local_programs import argument
from mpar.sharding._pass import graph_pass
from mpar.sharding._rules import RULES, has_rule, tensor_operands
from mpar.torch_private import FakeTensorMode, _core_aten_decompositions_post_autograd, decomposition_table, make_fx

__all__ = ["decompose"]

aten = torch.ops.aten
MORE = (
    aten._batch_norm_with_update.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
    aten.addmv.default,
    aten.as_strided_copy.default,
    aten.dist.default,
    aten.narrow_copy.default,
    aten.native_batch_norm.default,
    aten.permute_copy.default,
    aten.soft_margin_loss.default,
    aten.squeeze_copy.default,
    aten.squeeze_copy.dim,
    aten.squeeze_copy.dims,
    aten.transpose_copy.int,
    aten.unbind_copy.int,
    aten.unsqueeze_copy.default,
    aten.view_copy.default,
)
"""Ops outside of those that torch decomposes for its compilers, of which it has a decomposition nevertheless."""


@graph_pass
def decompose(graph: fx.Graph) -> dict[str, int]:
    """Replace ops without a rule by torch's decompositions of them, if these are pure.

    before:  %l = mse_loss(%x, %y, 0)
    after:   %d = sub(%x, %y); %l = pow(%d, 2)
    """
    decomposed = 0
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _table() and not (has_rule(node) and _keeps_rule(node)):
            decomposed += _inline(graph, node)
    return {"ops_decomposed": decomposed}


def _keeps_rule(node: fx.Node) -> bool:
    """Whether an op that has a rule keeps it. A batch norm by given statistics is element-wise, which only its parts show."""
    return node.target != aten.native_batch_norm.default or bool(argument(node, "training"))


@cache
def _table() -> dict[Any, Any]:
    """Torch's decompositions of the ops that have no rule."""
    every = {**_core_aten_decompositions_post_autograd(), **{op: decomposition_table[op] for op in MORE}}
    return {
        op: fn
        for op, fn in every.items()
        if (op in MORE or op not in RULES) and torch.Tag.pointwise not in getattr(op, "tags", ())
    }


def _inline(graph: fx.Graph, node: fx.Node) -> bool:
    """Put the decomposition of a node in its place; False if there is none that is pure."""
    operands = tensor_operands(node)
    with FakeTensorMode(allow_non_fake_inputs=True):
        values = [operand.meta["val"] for operand in operands]
        fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu") for x in values]

    def call(*tensors: Tensor) -> object:
        remaining = iter(tensors)
        given = fx.node.map_arg((node.args, node.kwargs), lambda n: next(remaining))
        args, kwargs = fx.node.map_aggregate(given, lambda item: item)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    inner = make_fx(torch.func.functionalize(call), decomposition_table=_table())(*fakes).graph
    inner.eliminate_dead_code(lambda n: n.op in ("placeholder", "output"))
    if any(_impure(n) or n.target == node.target for n in inner.nodes) or _shapes(inner.output_node()) != _shapes(node):
        return False
    copies = dict(zip(inner.find_nodes(op="placeholder"), operands, strict=True))
    with graph.inserting_before(node):
        for n in inner.nodes:
            if n.op == "call_function":
                copies[n] = graph.node_copy(n, lambda used: copies[used])
                copies[n].meta = {"val": n.meta["val"], "stack_trace": node.meta.get("stack_trace")}
    (out,) = inner.output_node().args
    if isinstance(out, fx.Node):
        node.replace_all_uses_with(copies[out])
    else:
        for user in list(node.users):
            user.replace_all_uses_with(copies[out[user.args[1]]])
            graph.erase_node(user)
    graph.erase_node(node)
    return True


def _shapes(node: fx.Node) -> list[tuple[Any, ...]]:
    """Shapes and dtypes of the results: some decompositions do not give all that the op gives."""
    if node.op == "output":
        out = node.args[0]
        values: Any = [n and n.meta["val"] for n in (out if isinstance(out, (list, tuple)) else [out])]
    else:
        values = node.meta["val"] if isinstance(node.meta["val"], (list, tuple)) else [node.meta["val"]]
    return [(value.shape, value.dtype) if isinstance(value, Tensor) else () for value in values]


def _impure(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "get_attr" or (schema is not None and schema.is_mutable) or node.target == aten.as_strided.default
