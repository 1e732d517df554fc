"""Pairs of answers: entries of their batches, and what losses of pairs read: log-probabilities of answers, side by side."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mpar.tasks._answers import members_of, per_answer
from mpar.tasks._task import BY_ANSWER, BY_TOKEN, Entry, Means

__all__ = [
    "ANSWER_ENTRIES",
    "AnswerScores",
    "FromData",
    "Sides",
    "answer_scores",
    "from_data",
    "num_pairs",
    "of_pairs",
    "pair_means",
    "sides",
    "smoothed",
    "total",
]

ANSWER_ENTRIES: Mapping[str, Entry] = {"answers": Entry(BY_TOKEN, torch.int64), "signs": Entry(BY_ANSWER, torch.int64)}
FromData = float | Literal["data"]
"""A number, or that each row of the data has its own, in the column of that name."""


@dataclass(frozen=True)
class AnswerScores:
    """Of every answer: the sum of the log-probabilities of its tokens, and how many they are, at least 1. Both (B, N)."""

    sums_BN: Tensor
    lengths_BN: Tensor

    @property
    def means_BN(self) -> Tensor:
        """The mean log-probability of a token."""
        return self.sums_BN / self.lengths_BN


@dataclass(frozen=True)
class Sides:
    """A number of each preferred answer and one of each rejected answer, (B, P)."""

    chosen: Tensor
    rejected: Tensor

    @property
    def margin(self) -> Tensor:
        """By how much the first exceeds the second."""
        return self.chosen - self.rejected


def answer_scores(logps_BS: Tensor, batch: Mapping[str, Tensor], ld_alpha: float | None = None) -> AnswerScores:
    """The log-probabilities of each answer, from those of the labels.

    ld_alpha: of a pair, tokens of the longer answer beyond the length of the shorter one weigh so much in its sum (Liu et al.
    2024, arXiv:2409.06411); the entry `indices` (B, S) says which token of its answer a label is.
    """
    members_BSN = members_of(batch["answers"], batch["signs"].shape[1], logps_BS.dtype)
    lengths_BN = members_BSN.sum(1)
    if ld_alpha is not None:
        shorter_BN = lengths_BN.unflatten(1, (-1, 2)).amin(2, keepdim=True).expand(-1, -1, 2).flatten(1)
        beyond_BSN = batch["indices"][..., None] >= shorter_BN[:, None]
        members_BSN = members_BSN * (1 - (1 - ld_alpha) * beyond_BSN.to(members_BSN.dtype))
    return AnswerScores(per_answer(logps_BS, members_BSN), lengths_BN.clamp(min=1))


def sides(x_BN: Tensor) -> Sides:
    """The two answers of every pair."""
    return Sides(*x_BN.unflatten(1, (-1, 2)).unbind(2))


def of_pairs(batch: Mapping[str, Tensor]) -> Tensor:
    """(B, P): whether there is a pair."""
    return sides(batch["signs"]).chosen == 1


def num_pairs(batch: Mapping[str, Tensor]) -> Tensor:
    """How many pairs a batch has."""
    return of_pairs(batch).sum()


def from_data(given: FromData, column_BN: Tensor | None, present_BP: Tensor, like: Tensor) -> Tensor | float:
    """The number of each pair: the same for all, or that of the preferred answer in a column of the batch."""
    if not isinstance(given, str):
        return given
    assert column_BN is not None
    return torch.where(present_BP, sides(column_BN).chosen, 1.0).to(like.dtype)


def smoothed(x: Tensor, smoothing: float) -> Tensor:
    """Minus the logarithm of sigmoid(x), where a share of the pairs is labelled the other way round."""
    return -(1 - smoothing) * logsigmoid(x) - smoothing * logsigmoid(-x)


def total(losses_BP: Tensor, present_BP: Tensor) -> Tensor:
    """The sum over the pairs that there are."""
    return torch.where(present_BP, losses_BP, 0.0).sum()


def pair_means(rewards: Sides, logps: Sides, present_BP: Tensor) -> Means:
    """What is worth seeing of pairs: rewards and log-probabilities of both sides, how often the preferred answer has the higher
    reward, and by how much."""
    right_BP = (rewards.chosen > rewards.rejected).to(rewards.chosen.dtype)
    values = {
        "rewards/chosen": rewards.chosen,
        "rewards/rejected": rewards.rejected,
        "rewards/accuracies": right_BP,
        "rewards/margins": rewards.margin,
        "logps/chosen": logps.chosen,
        "logps/rejected": logps.rejected,
    }
    count = present_BP.to(rewards.chosen.dtype).sum()
    return {name: (torch.where(present_BP, value, 0.0).sum(), count) for name, value in values.items()}
