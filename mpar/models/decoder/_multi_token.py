"""Multi-token prediction: one more layer learns the token after the next (DeepSeek-AI 2024, arXiv:2412.19437, section 2.2).

It reads the normed output of the decoder at a position and the embedding of the next token, and shares embedding and head.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from mpar.errors import ConfigError
from mpar.tree import struct

__all__ = [
    "NEXT_KEYS",
    "NEXT_WEIGHTS",
    "MultiToken",
    "MultiTokenConfig",
    "multi_token_axes",
    "multi_token_shapes",
    "with_next_tokens",
]

NEXT_KEYS = ("next_tokens", "next_labels")
"""Batch keys (B, S) that it reads; see `with_next_tokens`."""
NEXT_WEIGHTS = "next_token_weights"
"""That of a batch with token_weights: those of the next labels."""


@dataclass(frozen=True)
class MultiTokenConfig:
    """layer: the LayerConfig of the further layer. loss_weight: of its loss; ConfigError unless it is positive and finite."""

    layer: Any
    loss_weight: float

    def __post_init__(self) -> None:
        if not 0 < self.loss_weight < math.inf:
            raise ConfigError(
                f"cannot predict further tokens with mtp_loss_weight={self.loss_weight}: it must be positive, or None (null) for "
                "a model without the layer"
            )


@struct
class MultiToken:
    """Norms of the two inputs, the matrices that join them, the layer, the norm before the shared head."""

    embed_norm_D: Tensor
    hidden_norm_D: Tensor
    embed_DD: Tensor
    hidden_DD: Tensor
    block: Any
    norm_D: Tensor


def multi_token_shapes(hidden_size: int, block: Any) -> MultiToken:
    """The parameters with a tuple of sizes for each leaf; `block` is that of the layer."""
    D = hidden_size
    return cast(Any, MultiToken)((D,), (D,), (D, D), (D, D), block, (D,))


def multi_token_axes(block: Any) -> MultiToken:
    """The logical axes of each leaf."""
    norm, join = ("embed",), ("embed", None)
    return cast(Any, MultiToken)(norm, norm, join, join, block, norm)


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
