"""flex_attention: with a mask that is proved to be causal, a window, documents, or some of these at once, it is the primitive.

A mask is a function of indices. It is computed for all of them and compared with what the primitive would see: only if both are
equal everywhere does the primitive take the place of torch's op.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from mpar import ops
from mpar.errors import TraceError
from mpar.torch_private import no_score_change, outside_the_trace, visible_keys

__all__ = ["flex_attention"]

INSTEAD = (
    "Use mpar.ops.attention(q_BSNH, k_BMKH, v_BMKH, causal=..., window=..., q_documents=..., k_documents=..., soft_cap=...); "
    "documents may be arguments of the function there."
)


@dataclass(frozen=True)
class _Mask:
    """A mask of the primitive: what `ops.attention` takes."""

    causal: bool
    window: int | None
    documents_BS: Tensor | None

    def visible(self, num_queries: int, num_keys: int) -> Tensor:
        """(batch or 1, queries, keys): which keys a query sees."""
        i_S1, j_1M = torch.arange(num_queries)[:, None], torch.arange(num_keys)[None]
        visible_BSM = torch.ones(1, num_queries, num_keys, dtype=torch.bool)
        if self.causal:
            visible_BSM = visible_BSM & (j_1M <= i_S1)
        if self.window is not None:
            visible_BSM = visible_BSM & (i_S1 - j_1M < self.window)
        if self.documents_BS is not None:
            own, other = self.documents_BS[:, :, None], self.documents_BS[:, None]
            visible_BSM = visible_BSM & (own == other) & (own != -1)
        return visible_BSM


def flex_attention(
    q_BNSH: Tensor,
    k_BKMH: Tensor,
    v_BKMH: Tensor,
    score_mod: Callable,
    block_mask: tuple[object, ...],
    scale: float,
    kernel_options: Mapping[str, object],
    *_: object,
) -> tuple[Tensor, Tensor, Tensor]:
    """What torch's op of this name returns: the averages, the log-sum-exp to base 2, and no maxima.

    Raises TraceError for a mask that the primitive does not have, for a function of scores, and where maxima are asked for.
    """
    if score_mod is not no_score_change or kernel_options.get("OUTPUT_MAX"):
        raise TraceError(f"flex_attention with a score_mod or with maxima has no counterpart.\n{INSTEAD}")
    num_queries, num_keys = q_BNSH.shape[2], k_BKMH.shape[2]
    with outside_the_trace():
        mask_mod = cast(Callable[..., Tensor], block_mask[-1])
        visible = visible_keys(mask_mod, q_BNSH.shape[0], q_BNSH.shape[1], num_queries, num_keys)
        mask = None if visible is None else _recognise(visible)
    if mask is None:
        raise TraceError(f"flex_attention: its mask is not known to be causal, a window, or documents.\n{INSTEAD}")
    documents_BS = mask.documents_BS
    if documents_BS is not None:
        documents_BS = documents_BS.expand(len(q_BNSH), -1).contiguous()
    out_BSNH, lse_BSN = ops.attention(
        *(x.transpose(1, 2) for x in (q_BNSH, k_BKMH, v_BKMH)),
        q_documents=documents_BS,
        k_documents=documents_BS,
        causal=mask.causal,
        window=mask.window,
        scale=scale,
    )
    return out_BSNH.transpose(1, 2), lse_BSN.transpose(1, 2) / math.log(2.0), q_BNSH.new_empty(0)


def _recognise(visible_BHSM: Tensor) -> _Mask | None:
    """The mask of the primitive that sees exactly these keys, or None if there is none."""
    visible_BSM = visible_BHSM[:, 0]
    if not (visible_BHSM == visible_BHSM[:, :1]).all():
        return None
    num_queries, num_keys = visible_BSM.shape[1:]
    i_S1, j_1M = torch.arange(num_queries)[:, None], torch.arange(num_keys)[None]
    causal = not (visible_BSM & (j_1M > i_S1)).any()
    furthest = int(torch.where(visible_BSM, i_S1 - j_1M, -1).max()) + 1
    windows = [None, furthest] if furthest > 0 else [None]
    documents = [None, _documents(visible_BSM)] if num_queries == num_keys else [None]
    for documents_BS in documents:
        for window in windows:
            mask = _Mask(causal, window, documents_BS)
            if torch.equal(mask.visible(num_queries, num_keys).expand_as(visible_BSM), visible_BSM):
                return mask
    return None


def _documents(visible_BSM: Tensor) -> Tensor:
    """The number of the document of each position, if documents are runs of neighbours of which one sees the other.

    It is -1 for positions that do not see themselves.
    """
    either_BSM = visible_BSM | visible_BSM.transpose(1, 2)
    joined = either_BSM.diagonal(1, 1, 2)
    starts = torch.cat([torch.ones_like(joined[:, :1]), ~joined], 1) if joined.shape[1] else torch.ones_like(visible_BSM[:, :, 0])
    documents_BS = starts.long().cumsum(1) - 1
    return documents_BS.masked_fill(~visible_BSM.diagonal(0, 1, 2), -1)
