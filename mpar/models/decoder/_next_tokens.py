"""Next tokens: what a batch has for multi-token prediction beside tokens and labels."""

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["NEXT_KEYS", "NEXT_WEIGHTS", "with_next_tokens"]

NEXT_KEYS = ("next_tokens", "next_labels")
"""Batch keys (B, S) that it reads; see `with_next_tokens`."""
NEXT_WEIGHTS = "next_token_weights"
"""The further key of a batch with token_weights: the weights of the next labels."""


def with_next_tokens(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`batch` with next_tokens and next_labels: what tokens and labels (B, S) hold one position further in the same document.

    Where there is no such position, the token is 0 and the label -100. With token_weights, next_token_weights are those of the
    next labels. Rows must be in their own order, so this comes before any dealing out to ranks that share a sequence.
    """
    tokens_BS, labels_BS, documents_BS = batch["tokens"], batch["labels"], batch.get("documents")
    there_BS = torch.ones_like(tokens_BS, dtype=torch.bool)
    there_BS[:, -1] = False
    if documents_BS is not None:
        there_BS &= documents_BS == documents_BS.roll(-1, 1)
    fills = {"next_tokens": (tokens_BS, 0), "next_labels": (labels_BS, -100)}
    if "token_weights" in batch:
        fills[NEXT_WEIGHTS] = (batch["token_weights"], 0)
    return {**batch, **{key: x_BS.roll(-1, 1).masked_fill(~there_BS, fill) for key, (x_BS, fill) in fills.items()}}
