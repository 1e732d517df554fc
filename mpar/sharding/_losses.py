"""Losses: a loss that torch computes in one op becomes ops that the lowering can shard, along the classes too."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from mpar.sharding._canonicalise import call_like, shape_of
from mpar.sharding._pass import graph_pass

__all__ = ["expand_losses"]

aten = torch.ops.aten
FORWARD = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
BACKWARD = (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
MEAN, SUM = 1, 2
"""How torch numbers the reductions of a loss; 0 is none."""
Call = Callable[..., fx.Node]


@graph_pass
def expand_losses(graph: fx.Graph) -> dict[str, int]:
    """Write the negative log-likelihood, and its gradient, as a choice of one element per row.

    before:  %l = nll_loss_forward(%logp, %labels, None, mean, -100)       # %logp: [rows, classes]
    after:   %p = gather(%logp, 1, %labels); %l = sum(masked(-%p)) / count

    The gradient adds its one element per row to zeros.
    """
    expanded = 0
    for node in list(graph.nodes):
        if node.target not in (*FORWARD, *BACKWARD):
            continue
        with graph.inserting_before(node):
            call = partial(call_like, graph, node)
            if node.target in FORWARD:
                results = _forward(lambda op, *args, call=call, **kwargs: call(op, args, kwargs), *node.args)
                for user in list(node.users):
                    user.replace_all_uses_with(results[user.args[1]])
                    graph.erase_node(user)
            else:
                node.replace_all_uses_with(_backward(lambda op, *args, call=call, **kwargs: call(op, args, kwargs), *node.args))
        graph.erase_node(node)
        expanded += 1
    return {"losses_expanded": expanded}


def _weights(call: Call, logp: fx.Node, labels: fx.Node, weight: fx.Node | None, ignore_index: int) -> tuple[fx.Node, fx.Node]:
    """For each row the label, or 0 if it is ignored, and the weight, which is 0 if it is ignored."""
    ignored = call(aten.eq.Scalar, labels, ignore_index)
    safe = call(aten.masked_fill.Scalar, labels, ignored, 0)
    dtype = logp.meta["val"].dtype
    if weight is None:
        return safe, call(aten._to_copy.default, call(aten.logical_not.default, ignored), dtype=dtype)
    return safe, call(aten.masked_fill.Scalar, call(aten.index.Tensor, weight, [safe]), ignored, 0.0)


def _forward(
    call: Call, logp: fx.Node, labels: fx.Node, weight: fx.Node | None, reduction: int, ignore_index: int
) -> tuple[fx.Node, fx.Node]:
    dim = 1 if len(shape_of(logp)) > 1 else 0
    safe, weights = _weights(call, logp, labels, weight, ignore_index)
    chosen = call(aten.gather.default, logp, dim, call(aten.unsqueeze.default, safe, dim))
    chosen = call(aten.squeeze.dim, chosen, dim)
    ignored = call(aten.eq.Scalar, labels, ignore_index)  # an ignored row may hold infinities, and 0 * inf is not 0
    loss = call(aten.mul.Tensor, call(aten.masked_fill.Scalar, call(aten.neg.default, chosen), ignored, 0.0), weights)
    if reduction not in (MEAN, SUM):
        return loss, call(aten.sum.default, weights)
    wide = torch.promote_types(logp.meta["val"].dtype, torch.float32)
    total, count = (call(aten.sum.default, value, dtype=wide) for value in (loss, weights))
    result = call(aten.div.Tensor, total, count) if reduction == MEAN else total
    dtype = logp.meta["val"].dtype
    return tuple(v if wide == dtype else call(aten._to_copy.default, v, dtype=dtype) for v in (result, count))  # type: ignore[return-value]


def _backward(
    call: Call, dy: fx.Node, logp: fx.Node, labels: fx.Node, weight: Any, reduction: int, ignore_index: int, count: fx.Node
) -> fx.Node:
    dim = 1 if len(shape_of(logp)) > 1 else 0
    safe, weights = _weights(call, logp, labels, weight, ignore_index)
    slope = call(aten.mul.Tensor, call(aten.neg.default, weights), call(aten.div.Tensor, dy, count) if reduction == MEAN else dy)
    zeros = call(aten.fill.Scalar, logp, 0.0)  # unlike new zeros it has the spec of `logp`, so that the gradient gets it too
    slope, safe = (call(aten.unsqueeze.default, value, dim) for value in (slope, safe))
    return call(aten.scatter_add.default, zeros, dim, safe, slope)
