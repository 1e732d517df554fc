"""Attention of the queries of a slice to several sets of keys: those of the slice, and those of each slice before it. Yao et al.
2024, arXiv:2408.16978, section 4, cut sequences in this way.

Each set of keys (a `KeyPart`) is attended to by itself, and the results are merged by their log-sum-exps, in float32 or wider, as
ring attention does with the keys of other ranks. The results of single sets are not kept for the backward: the backward of
`attention` for one set is right if it is given the result and the log-sum-exp of all sets.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpar.ops.sequence._attention import attention_p
from mpar.ops.sequence._merge_attention import merge_attention_p

__all__ = ["KeyPart", "attention_parts"]


class KeyPart(NamedTuple):
    """One set of keys (B, M, K, H) and values, with their order (M,) and documents (B, M) as in `attention`."""

    k_BMKH: Tensor
    v_BMKH: Tensor
    order_M: Tensor | None = None
    documents_BM: Tensor | None = None


def attention_parts(
    q_BSNH: Tensor,
    current: KeyPart,
    past: Sequence[KeyPart] = (),
    *,
    sinks_N: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """(B, S, N, H): causal attention to the keys of the queries' own positions, and attention to all keys of `past`, which come
    before these positions.

    The order and the documents of the queries are those of `current`; if `current` has an order, all of `past` must have one. The
    other arguments are those of `attention`, and the result is that of `attention` to the keys of `current` and `past` together.
    It cannot be used within vmap. Raises ShapeError, DtypeError or ConfigError as `attention` does.
    """
    scale = q_BSNH.shape[-1] ** -0.5 if scale is None else scale
    settings = {"window": window, "scale": scale, "soft_cap": soft_cap}
    if not past:
        masks = (current.order_M, current.order_M, current.documents_BM, current.documents_BM, sinks_N)
        return attention_p.bind(q_BSNH, current.k_BMKH, current.v_BMKH, *masks, causal=True, **settings)[0]
    return _Parts.apply(settings, q_BSNH, sinks_N, *current, *(x for part in past for x in part))[0]


def _parts(flat: Sequence[Tensor | None]) -> list[KeyPart]:
    return [KeyPart(*flat[i : i + 4]) for i in range(0, len(flat), 4)]  # type: ignore[arg-type]


def _operands(q: Tensor, parts: Sequence[KeyPart], i: int, sinks: Tensor | None) -> tuple[Tensor | None, ...]:
    """The operands of `attention` for set `i` of keys; only the first has sinks, which must count once."""
    current, part = parts[0], parts[i]
    orders_and_documents = (current.order_M, part.order_M, current.documents_BM, part.documents_BM)
    return q, part.k_BMKH, part.v_BMKH, *orders_and_documents, sinks if i == 0 else None


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(settings: dict[str, Any], q: Tensor, sinks: Tensor | None, *flat: Tensor | None) -> tuple[Tensor, Tensor]:
        parts = _parts(flat)
        out, lse = attention_p.op(*_operands(q, parts, 0, sinks), causal=True, **settings)
        out = out.to(torch.promote_types(out.dtype, torch.float32))
        for i in range(1, len(parts)):
            past_results = attention_p.op(*_operands(q, parts, i, sinks), causal=False, **settings)
            out, lse = merge_attention_p.op(out, lse, *past_results)
        return out.to(q.dtype), lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)
        ctx.settings, *tensors = inputs
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
            dq_part, dk, dv, dsinks_part = attention_p.bwd.bind(*operands, out, lse, dout, None, causal=i == 0, **ctx.settings)
            dq_part = dq_part.to(torch.promote_types(dq_part.dtype, torch.float32))
            dq = dq_part if dq is None else dq + dq_part
            dsinks = dsinks_part if i == 0 and sinks is not None else dsinks
            grads += [dk, dv, None, None]
        assert dq is not None
        return None, dq.to(q.dtype), dsinks, *grads
