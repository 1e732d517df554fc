"""Next tokens: the entries of a batch that multi-token prediction needs besides tokens and labels."""

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["NEXT_KEYS", "NEXT_WEIGHTS", "with_next_tokens"]

NEXT_KEYS = ("next_tokens", "next_labels")
"""The batch keys, (B, S) each, that multi-token prediction reads; see `with_next_tokens`."""
NEXT_WEIGHTS = "next_token_weights"
"""One more key, (B, S), if the batch has token_weights: the weights of the next labels."""


def with_next_tokens(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`batch` with next_tokens and next_labels: at each position what tokens and labels (B, S) hold at the next position.

    If the next position is of another document or beyond the row, the token is 0 and the label -100. If the batch has
    token_weights, it gets next_token_weights, the weights of the next labels. Rows must not be permuted yet, so call this before
    rows are dealt out to ranks that share a sequence.
    """
    tokens_BS, labels_BS, documents_BS = batch["tokens"], batch["labels"], batch.get("documents")
    has_next_BS = torch.ones_like(tokens_BS, dtype=torch.bool)
    has_next_BS[:, -1] = False
    if documents_BS is not None:
        has_next_BS &= documents_BS == documents_BS.roll(-1, 1)
    fills = {"next_tokens": (tokens_BS, 0), "next_labels": (labels_BS, -100)}
    if "token_weights" in batch:
        fills[NEXT_WEIGHTS] = (batch["token_weights"], 0)
    return {**batch, **{key: x_BS.roll(-1, 1).masked_fill(~has_next_BS, fill) for key, (x_BS, fill) in fills.items()}}
