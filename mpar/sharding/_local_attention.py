"""Local programs of torch's attention: a rank attends from its queries, to the keys up to each one's global position."""

import torch
from torch import fx

from mpar.sharding._canonicalise import shape_of
from mpar.sharding._emit import Emit
from mpar.sharding._local_programs import argument, local_program
from mpar.sharding._pass_through import Pattern
from mpar.sharding._rules import DIVIDED, NodeRule

__all__: list[str] = []

aten = torch.ops.aten
QUERIES = "queries"
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _attention(node: fx.Node) -> NodeRule:
    """The rule of attention and of its gradients. Those of keys and values are sums over the queries. A causal mask depends on
    where a query is."""
    mask = argument(node, "attn_mask")
    masks = "*" if mask is None else f"b h {QUERIES} _" if len(shape_of(mask)) == 4 else f"{QUERIES} _"
    q, k = f"b h {QUERIES} _", "b h _ _"
    if node.target == FORWARD:
        rule = Pattern(f"{q}, {k}, {k}, {masks} -> {q}, b h {QUERIES}")(node)
    else:
        rule = Pattern(f"{q}, {q}, {k}, {k}, {q}, b h {QUERIES}, {masks} -> {q}, {k}, {k}")(node)
    rule.replicate = {QUERIES} & rule.sizes.keys() if argument(node, "is_causal") else set()
    return rule


def _later(emit: Emit, q: fx.Node, k: fx.Node) -> fx.Node:
    """What is added to scores so that no query sees a later key: -inf there, 0 elsewhere."""
    keys = emit(aten.arange.default, emit.shape(k)[2], dtype=torch.int64, device=torch.device("cpu"))
    later = emit(aten.gt.Tensor, keys, emit.positions(QUERIES, 2, 0))
    none = emit(aten.full.default, [], 0.0, dtype=q.meta["val"].dtype, device=torch.device("cpu"))
    return emit(aten.masked_fill.Scalar, none, later, float("-inf"))


@local_program(_attention, FORWARD)
def attention(
    emit: Emit, q: fx.Node, k: fx.Node, v: fx.Node, dropout: float = 0.0, causal: bool = False, **kwargs: object
) -> list:
    """No message."""
    out = emit(FORWARD, q, k, v, dropout, False, **{**kwargs, "attn_mask": _later(emit, q, k)})
    return [emit.getitem(out, 0), emit.getitem(out, 1)]


@local_program(_attention, BACKWARD)
def attention_gradients(emit: Emit, dy: fx.Node, q: fx.Node, k: fx.Node, *others: object, **kwargs: object) -> list:
    """No message; the gradients of keys and values are pending sums."""
    v, out, log_sum, dropout, _ = others
    given = {**kwargs, "attn_mask": _later(emit, q, k)}
    gradients = emit(BACKWARD, dy, q, k, v, out, log_sum, dropout, False, **given)
    return [emit.getitem(gradients, 0), *(emit.pending(emit.getitem(gradients, i)) for i in (1, 2))]


DIVIDED.update((FORWARD, BACKWARD))
