"""Scores: the log-probabilities of the tokens of texts that are there already, and the likeliest tokens in their places."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Scores", "scores_of_logits"]


@dataclass(frozen=True)
class Scores:
    """For each token of a text but the first: its log-probability behind those before it, and the likeliest tokens in its place,
    likeliest first, with their log-probabilities. All are on the CPU.
    """

    logprobs_S: Tensor
    likeliest_SK: Tensor
    likeliest_logprobs_SK: Tensor


def scores_of_logits(logits_SV: Tensor, tokens_S: Tensor, num_likeliest: int) -> Scores:
    """The scores of a text by the logits behind each of its tokens but the last."""
    logprobs_SV = logits_SV.to(torch.promote_types(logits_SV.dtype, torch.float32)).log_softmax(-1)
    values_SK, ids_SK = logprobs_SV.topk(min(num_likeliest, logprobs_SV.shape[-1]), -1)
    return Scores(logprobs_SV.gather(1, tokens_S[1:, None])[:, 0].cpu(), ids_SK.cpu(), values_SK.cpu())
