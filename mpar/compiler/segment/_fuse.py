"""Fuse: replace neighbouring ops by one call of a primitive that does the work of both.

Results keep their bits, because the reference of a fused primitive calls those of its parts. Norms and rotations are fused only
if the chip has a kernel for the fused primitive: without one, two ops of torch, which may write over operands, are as fast.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from mpar.compiler.segment._reuse import is_last_reader, is_sole_user
from mpar.kernels import REFERENCE, Kernels, choose
from mpar.ops import PRIMITIVES, Primitive, primitive_of
from mpar.sharding import erase_dead_nodes

__all__ = ["fuse"]

rms_norm_p, add_rms_norm_p, add_rms_norm_bwd_p = (PRIMITIVES[name] for name in ("rms_norm", "add_rms_norm", "add_rms_norm_bwd"))
layer_norm_p, add_layer_norm_p = PRIMITIVES["layer_norm"], PRIMITIVES["add_layer_norm"]
add_layer_norm_bwd_p = PRIMITIVES["add_layer_norm_bwd"]
LOSSES = {PRIMITIVES[name].op for name in ("cross_entropy", "linear_cross_entropy")}
LOSS_GRADIENTS = {
    PRIMITIVES[f"{name}_bwd"]: PRIMITIVES[f"{name}_grad"]
    for name in ("cross_entropy", "linear_cross_entropy", "linear_cross_entropy_x")
}
"""By the gradient of a loss: what gives the loss too. `_x`: without the gradient of a head that is frozen."""
rope_p, rope_many_p = PRIMITIVES["rope"], PRIMITIVES["rope_many"]
NORMS = {rms_norm_p: add_rms_norm_p, layer_norm_p: add_layer_norm_p}
NORM_GRADIENTS = {rms_norm_p.bwd: add_rms_norm_bwd_p, layer_norm_p.bwd: add_layer_norm_bwd_p}


def fuse(graph: fx.Graph, kernels: Kernels) -> dict[str, int]:
    """Run every fusion once on a rank graph; returns how often each applied."""
    statistics = {
        "norms_fused": _each(graph, kernels, NORMS, _fuse_norm),
        "norm_gradients_fused": _each(graph, kernels, NORM_GRADIENTS, _fuse_norm_gradient),
        "ropes_joined": _join_ropes(graph, kernels),
        "losses_joined": _each(graph, kernels, LOSS_GRADIENTS, _join_loss),
    }
    erase_dead_nodes(graph)
    graph.lint()
    return statistics


def _each(graph: fx.Graph, kernels: Kernels, table: dict[Primitive, Primitive], fusion: Callable[..., bool]) -> int:
    """Try `fusion` on every call of a primitive in `table`, which gives the fused primitive; returns how often it applied."""
    by_op = {primitive.op: fused for primitive, fused in table.items()}
    return sum(fusion(graph, kernels, node, by_op[node.target]) for node in list(graph.nodes) if node.target in by_op)


def _has_kernel(kernels: Kernels, primitive: Primitive, operands: Sequence[Any], params: dict[str, Any]) -> bool:
    """Whether a kernel, not the reference, would run `primitive` on these operands if the best were chosen."""
    values = fx.node.map_arg(tuple(operands), lambda n: n.meta["val"])
    return kernels.mode != "torch" and choose(Kernels("auto", kernels.arch), primitive.name, values, params)[0] != REFERENCE


def _is_sum(node: Any, like: torch.Tensor) -> bool:
    """Whether `node` adds two values of the shape and dtype of `like`."""
    if not isinstance(node, fx.Node) or node.target != torch.ops.aten.add.Tensor or node.kwargs:
        return False
    return all(
        isinstance(n, fx.Node) and (n.meta["val"].shape, n.meta["val"].dtype) == (like.shape, like.dtype) for n in node.args
    )


def _fuse_norm(graph: fx.Graph, kernels: Kernels, norm: fx.Node, fused: Primitive) -> bool:
    """Fuse a norm with the sum that it reads, if others read the sum too: it is then the residual stream.

    before:  %t = add(%x, %r); %y = rms_norm(%t, %w)
    after:   %y, %t = add_rms_norm(%x, %r, %w)
    """
    total, *gains = norm.args
    if not _is_sum(total, norm.meta["val"]) or len(total.users) < 2:
        return False
    operands = (*total.args, *gains)
    place = _order(graph)
    if any(isinstance(n, fx.Node) and place[n] > place[total] for n in gains):
        return False
    if not _has_kernel(kernels, fused, operands, norm.kwargs):
        return False
    y, new_total = _call(graph, total, fused, operands, norm.kwargs, [norm, total])
    norm.replace_all_uses_with(y)
    total.replace_all_uses_with(new_total)
    graph.erase_node(norm)
    graph.erase_node(total)
    return True


def _fuse_norm_gradient(graph: fx.Graph, kernels: Kernels, gradient: fx.Node, fused: Primitive) -> bool:
    """Fuse the gradient of a norm's operand with the addition of the residual stream's gradient to it.

    before:  %dx, %dw = rms_norm_bwd(%t, %w, %dy); %d = add(%dt, %dx)
    after:   %d, %dw = add_rms_norm_bwd(%t, %w, %dy, %dt)
    """
    old_results = {user.args[1]: user for user in gradient.users}
    dx = old_results.get(0)
    if dx is None or len(dx.users) != 1:
        return False
    (total,) = dx.users
    if not _is_sum(total, dx.meta["val"]):
        return False
    dtotal = total.args[0] if total.args[1] is dx else total.args[1]
    operands = (*gradient.args, dtotal)
    place = _order(graph)
    if dtotal is dx or place[dtotal] > place[gradient] or not _has_kernel(kernels, fused, operands, gradient.kwargs):
        return False
    results = _call(
        graph, gradient, fused, operands, gradient.kwargs, [total, *(old_results.get(i) for i in range(1, len(fused.results)))]
    )
    total.replace_all_uses_with(results[0])
    graph.erase_node(total)
    for i, result in enumerate(results[1:], 1):
        if i in old_results:
            old_results[i].replace_all_uses_with(result)
    for old in old_results.values():
        graph.erase_node(old)
    graph.erase_node(gradient)
    return True


def _join_ropes(graph: fx.Graph, kernels: Kernels) -> int:
    """Join rotations by the same tables into one call that writes over its operands, which nothing else reads.

    before:  %q1 = rope(%q, %cos, %sin); %k1 = rope(%k, %cos, %sin)
    after:   %q1, %k1 = rope_many([%q, %k], %cos, %sin)
    """
    groups: dict[tuple, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target == rope_p.op and is_last_reader(node.args[0], node) and is_sole_user(graph, node.args[0]):
            groups.setdefault((*node.args[1:], node.kwargs["interleaved"]), []).append(node)
    joined = 0
    for (cos, sin, interleaved), nodes in groups.items():
        place = _order(graph)
        last = max(nodes, key=place.__getitem__)
        together = [node for node in nodes if all(place[user] > place[last] for user in node.users)]
        operands, params = ([node.args[0] for node in together], cos, sin), {"interleaved": interleaved}
        if not _has_kernel(kernels, rope_many_p, operands, params):
            continue
        values = [node.args[0].meta["val"] for node in together]
        for node, result in zip(together, _call(graph, last, rope_many_p, operands, params, together, values), strict=True):
            node.replace_all_uses_with(result)
            graph.erase_node(node)
        joined += len(together)
    return joined


def _join_loss(graph: fx.Graph, kernels: Kernels, gradient: fx.Node, joined: Primitive) -> bool:
    """Join a loss and its gradients, so that the logits are computed once for both, which pays even without a kernel. Where they
    are an operand, they are exponentiated once, and the gradient is written over them.

    before:  %loss, %lse = linear_cross_entropy(%x, %w, %l); %dx, %dw = linear_cross_entropy_bwd(%x, %w, %l, %lse, %d)
    after:   %loss, %lse, %dx, %dw = linear_cross_entropy_grad(%x, %w, %l, %d)
    """
    *operands, lse, dloss, dlse = gradient.args
    loss = lse.args[0] if isinstance(lse, fx.Node) and lse.target is operator.getitem else None
    if dlse is not None or dloss is None or not isinstance(loss, fx.Node):
        return False
    if loss.target not in LOSSES or list(loss.args) != operands or loss.kwargs != gradient.kwargs:
        return False
    if loss in _reaching(dloss):
        return False
    if joined.mutates and not _may_overwrite(graph, kernels, loss, gradient):
        return False
    only = len(joined.results) == 3  # the gradient of x is the one result of the node, which nothing takes it out of
    gradients = {2: gradient} if only else {2 + node.args[1]: node for node in gradient.users}
    old_results = {node.args[1]: node for node in loss.users} | gradients
    like = [old_results.get(i) for i in range(len(joined.results))]
    values = [*loss.meta["val"], operands[0].meta["val"]] if joined.mutates else None
    results = _call(graph, gradient, joined, (*operands, dloss), gradient.kwargs, like, values)
    for i, old in old_results.items():
        old.replace_all_uses_with(results[i])
    for node in dict.fromkeys((*reversed(old_results.values()), gradient, loss)):
        graph.erase_node(node)
    _sink(graph, results[0].args[0])
    return True


def _may_overwrite(graph: fx.Graph, kernels: Kernels, loss: fx.Node, gradient: fx.Node) -> bool:
    """Whether the gradient of a loss may be written over its logits by torch's ops: nothing else reads them, nor do kernels."""
    logits, primitive = loss.args[0], primitive_of(gradient.target)
    if not isinstance(logits, fx.Node) or logits.op != "call_function" or {*logits.users} != {loss, gradient}:
        return False
    assert primitive is not None
    return is_sole_user(graph, logits) and not _has_kernel(kernels, primitive, gradient.args, gradient.kwargs)


def _reaching(node: fx.Node) -> set[fx.Node]:
    """`node` and all nodes from which it is computed."""
    seen: set[fx.Node] = set()
    todo = [node]
    while todo:
        found = todo.pop()
        if found not in seen:
            seen.add(found)
            todo.extend(found.all_input_nodes)
    return seen


def _sink(graph: fx.Graph, call: fx.Node) -> None:
    """Move every node that stands before `call`, but reads its results, to behind these results; such nodes keep their order."""
    place = _order(graph)
    late, last = {call, *call.users}, max(call.users, key=place.__getitem__)
    for node in list(graph.nodes):
        if node not in late and place[node] < place[call] and late.intersection(node.all_input_nodes):
            late.add(node)
            last.append(node)
            last = node


def _order(graph: fx.Graph) -> dict[fx.Node, int]:
    """The place of every node in the order of the graph."""
    return {node: index for index, node in enumerate(graph.nodes)}


def _call(
    graph: fx.Graph,
    anchor: fx.Node,
    primitive: Primitive,
    operands: Sequence[Any],
    params: dict[str, Any],
    like: Sequence[fx.Node | None],
    values: Sequence[torch.Tensor] | None = None,
) -> list[fx.Node]:
    """Insert a call of `primitive` before `anchor`; returns a node for each result.

    like:   for each result the node that it replaces, whose metadata it takes over; None if nothing reads the result.
    values: tensors without data for the results, if these are the operands themselves, written over.
    """
    kwargs = {name: params[name] for name in primitive.params}
    if values is None:
        values = primitive.op(*fx.node.map_arg(tuple(operands), lambda n: n.meta["val"]), **kwargs)
    metadata = next(node.meta for node in like if node is not None)
    with graph.inserting_before(anchor):
        call = graph.call_function(primitive.op, tuple(operands), kwargs)
        call.meta = dict(metadata) | {"val": tuple(values), "spec": None}
        results = [graph.call_function(operator.getitem, (call, i)) for i in range(len(values))]
    for result, old, value in zip(results, like, values, strict=True):
        result.meta = dict(metadata if old is None else old.meta) | {"val": value}
    return results
