"""Attention of a slice of rows to itself, and to the keys and values that were carried from earlier slices of the same rows."""

from collections.abc import Mapping, Sequence

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
    *,
    sinks_N: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """(B, S, N, H): causal attention within a document to the keys and values of this slice, and to those of each in `past`.

    `context` may have order (S,) and documents (B, S). For each slice in `past` it has the order, and may have the documents,
    under the keys that `of_past` gives. The other arguments are those of `ops.attention_parts`.
    """
    past_parts = [
        ops.KeyPart(k, v, context[of_past("order", i)], context.get(of_past("documents", i))) for i, (k, v) in enumerate(past)
    ]
    slice_part = ops.KeyPart(k_BSKH, v_BSKH, context.get("order"), context.get("documents"))
    return ops.attention_parts(q_BSNH, slice_part, past_parts, sinks_N=sinks_N, window=window, scale=scale, soft_cap=soft_cap)
