"""Attention of queries to keys in several parts, of a slice of a sequence and of slices before it: what a ring does along ranks,
done along time. Yao et al. 2024, arXiv:2408.16978, section 4, cut sequences so.

Parts are attended to one by one and merged by their log-sum-exps, in float32 or wider. The gradient needs no partial result: that
of `attention` for one part is right with the result and the log-sum-exp of all.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpar.ops.sequence._attention import attention_p
from mpar.ops.sequence._merge_attention import merge_attention_p

__all__ = ["KeyPart", "attention_parts"]


class KeyPart(NamedTuple):
    """Keys (B, M, K, H) and values, and of these the order (M,) and documents (B, M), as in `attention`."""

    k_BMKH: Tensor
    v_BMKH: Tensor
    order_M: Tensor | None = None
    documents_BM: Tensor | None = None


def attention_parts(
    q_BSNH: Tensor,
    own: KeyPart,
    past: Sequence[KeyPart] = (),
    *,
    sinks_N: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """(B, S, N, H): attention of queries to the keys of their own positions, causal, and to all keys of `past`, which lie before.

    Order and documents of the queries are those of `own`; where it has an order, all parts must. Everything else is as in
    `attention`, which it equals on the keys of all parts together. Parts are merged as far as they go: there is no vmap.
    Raises ShapeError, DtypeError or ConfigError as `attention` does.
    """
    scale = q_BSNH.shape[-1] ** -0.5 if scale is None else scale
    how = {"window": window, "scale": scale, "soft_cap": soft_cap}
    if not past:
        rest = (own.order_M, own.order_M, own.documents_BM, own.documents_BM, sinks_N)
        return attention_p.bind(q_BSNH, own.k_BMKH, own.v_BMKH, *rest, causal=True, **how)[0]
    return _Parts.apply(how, q_BSNH, sinks_N, *own, *(x for part in past for x in part))[0]


def _parts(flat: Sequence[Tensor | None]) -> list[KeyPart]:
    return [KeyPart(*flat[i : i + 4]) for i in range(0, len(flat), 4)]  # type: ignore[arg-type]


def _operands(q: Tensor, parts: Sequence[KeyPart], i: int, sinks: Tensor | None) -> tuple[Tensor | None, ...]:
    """Those of `attention` for part `i`; sinks count once."""
    own, part = parts[0], parts[i]
    orders_and_documents = (own.order_M, part.order_M, own.documents_BM, part.documents_BM)
    return q, part.k_BMKH, part.v_BMKH, *orders_and_documents, sinks if i == 0 else None


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(how: dict[str, Any], q: Tensor, sinks: Tensor | None, *flat: Tensor | None) -> tuple[Tensor, Tensor]:
        parts = _parts(flat)
        out, lse = attention_p.op(*_operands(q, parts, 0, sinks), causal=True, **how)
        out = out.to(torch.promote_types(out.dtype, torch.float32))
        for i in range(1, len(parts)):
            more = attention_p.op(*_operands(q, parts, i, sinks), causal=False, **how)
            out, lse = merge_attention_p.op(out, lse, *more)
        return out.to(q.dtype), lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)
        ctx.how, *tensors = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, _: None) -> tuple[Any, ...]:
        q, sinks, *flat, out, lse = ctx.saved_tensors
        if dout is None:
            return (None,) * (3 + len(flat))
        parts, dq, dsinks, grads = _parts(flat), None, None, []
        for i in range(len(parts)):
            operands = _operands(q, parts, i, sinks)
            part, dk, dv, more = attention_p.bwd.bind(*operands, out, lse, dout, None, causal=i == 0, **ctx.how)
            part = part.to(torch.promote_types(part.dtype, torch.float32))
            dq = part if dq is None else dq + part
            dsinks = more if i == 0 and sinks is not None else dsinks
            grads += [dk, dv, None, None]
        assert dq is not None
        return None, dq.to(q.dtype), dsinks, *grads
