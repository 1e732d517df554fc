"""Attention of a slice of rows to itself and to the slices before it, merged by log-sum-exp.

It is what a ring does along ranks, done along time (Yao et al. 2024, arXiv:2408.16978, section 4, cut sequences so).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mpar import ops
from mpar.chain import of_past

__all__ = ["attend_past"]


def attend_past(
    q_BSNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    past: Sequence[tuple[Tensor, Tensor]],
    context: Mapping[str, Tensor],
    sinks_N: Tensor | None = None,
    **how: Any,
) -> Tensor:
    """(B, S, N, H): causal attention within a document to the keys and values of this slice, and to those of each in `past`.

    `context` may have order (S,) and documents (B, S), also those of past slices, whose positions all come before these. `how` is
    window, scale and soft_cap of `ops.attention`. Parts are added up in float32 or wider.
    """
    order_S, documents_BS = context.get("order"), context.get("documents")
    out_BSNH, lse_BSN = ops.attention(
        q_BSNH,
        k_BSKH,
        v_BSKH,
        q_order=order_S,
        k_order=order_S,
        q_documents=documents_BS,
        k_documents=documents_BS,
        sinks=sinks_N,
        causal=True,
        **how,
    )
    if past:
        out_BSNH = out_BSNH.to(torch.promote_types(out_BSNH.dtype, torch.float32))
    for i, (k_BMKH, v_BMKH) in enumerate(past):
        part_BSNH, part_BSN = ops.attention(
            q_BSNH,
            k_BMKH,
            v_BMKH,
            q_order=order_S,
            k_order=context[of_past("order", i)],
            q_documents=documents_BS,
            k_documents=context.get(of_past("documents", i)),
            causal=False,
            **how,
        )
        out_BSNH, lse_BSN = ops.merge_attention(out_BSNH, lse_BSN, part_BSNH, part_BSN)
    return out_BSNH.to(q_BSNH.dtype)
