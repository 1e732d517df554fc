"""Sums over the tokens of each answer in a row, and back: several answers share a row, as documents do."""

import torch
from torch import Tensor

from mpar import ops

__all__ = ["members_of", "per_answer", "per_token"]


def members_of(answers_BS: Tensor, num_answers: int, dtype: torch.dtype) -> Tensor:
    """(B, S, N): 1 where the label at a position counts for an answer. `answers_BS` has the index of that answer, or -1."""
    index_N = torch.arange(num_answers, device=answers_BS.device)
    return (answers_BS[..., None] == index_N).to(dtype)


def per_answer(x_BS: Tensor, members_BSN: Tensor) -> Tensor:
    """(B, N): for each answer the sum over its tokens."""
    return ops.einsum("bs,bsn->bn", x_BS, members_BSN)


def per_token(x_BN: Tensor, members_BSN: Tensor) -> Tensor:
    """(B, S): for each token the value of its answer; 0 where there is no answer."""
    return ops.einsum("bn,bsn->bs", x_BN, members_BSN)
