"""Grouped-query attention with RoPE (Ainslie et al. 2023, arXiv:2305.13245): parameters, their logical axes, the function."""

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from mpar import ops
from mpar.tree import struct

__all__ = ["ATTENTION_AXES", "Attention", "attend"]


@struct
class Attention:
    """Projections, with optional biases and optional RMS norms of each query and key head."""

    q_DNH: Tensor
    k_DKH: Tensor
    v_DKH: Tensor
    o_NHD: Tensor
    q_bias_NH: Tensor | None = None
    k_bias_KH: Tensor | None = None
    v_bias_KH: Tensor | None = None
    o_bias_D: Tensor | None = None
    q_norm_H: Tensor | None = None
    k_norm_H: Tensor | None = None


ATTENTION_AXES = cast(Any, Attention)(
    q_DNH=("embed", "heads", "head"),
    k_DKH=("embed", "kv_heads", "head"),
    v_DKH=("embed", "kv_heads", "head"),
    o_NHD=("heads", "head", "embed"),
    q_bias_NH=("heads", "head"),
    k_bias_KH=("kv_heads", "head"),
    v_bias_KH=("kv_heads", "head"),
    o_bias_D=("embed",),
    q_norm_H=("head",),
    k_norm_H=("head",),
)


def attend(params: Attention, x_BSD: Tensor, context: Mapping[str, Tensor], *, window: int | None, norm_eps: float) -> Tensor:
    """Causal attention of `x_BSD` to itself, within a document and, if given, within `window` positions.

    `context` has the tables cos and sin, and documents (B, S) where rows are packed.
    """
    q_BSNH = _heads(x_BSD, params.q_DNH, params.q_bias_NH, "q")
    k_BSKH = _heads(x_BSD, params.k_DKH, params.k_bias_KH, "k")
    v_BSKH = _heads(x_BSD, params.v_DKH, params.v_bias_KH, "v")
    if params.q_norm_H is not None:
        q_BSNH = ops.name(ops.rms_norm(q_BSNH, params.q_norm_H, eps=norm_eps), "q_norm")
    if params.k_norm_H is not None:
        k_BSKH = ops.name(ops.rms_norm(k_BSKH, params.k_norm_H, eps=norm_eps), "k_norm")
    q_BSNH = ops.name(ops.rope(q_BSNH, context["cos"], context["sin"]), "q_rope")
    k_BSKH = ops.name(ops.rope(k_BSKH, context["cos"], context["sin"]), "k_rope")
    documents_BS = context.get("documents")
    out_BSNH, _ = ops.attention(
        q_BSNH, k_BSKH, v_BSKH, q_documents=documents_BS, k_documents=documents_BS, causal=True, window=window
    )
    out_BSNH = ops.name(out_BSNH, "attn")
    out_BSD = ops.constrain(ops.einsum("bsnh,nhd->bsd", out_BSNH, params.o_NHD), ("batch", "residual_seq", "embed"))
    if params.o_bias_D is not None:
        out_BSD = out_BSD + params.o_bias_D
    return ops.name(out_BSD, "attn_out")


def _heads(x_BSD: Tensor, weight_DNH: Tensor, bias_NH: Tensor | None, label: str) -> Tensor:
    y_BSNH = ops.einsum("bsd,dnh->bsnh", x_BSD, weight_DNH)
    return ops.name(y_BSNH if bias_NH is None else y_BSNH + bias_NH, label)
