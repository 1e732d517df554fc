"""Losses: the mean loss of a model on whole sets of data, in which each row counts once."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mpar.data import Documents
from mpar.infer._engine import Runner

__all__ = ["SetLoss", "loss_of"]


@dataclass(frozen=True)
class SetLoss:
    """The loss of a set in nats per token, and how many tokens that have a label it has."""

    loss: float
    num_tokens: int
    num_documents: int

    @property
    def perplexity(self) -> float:
        """The exponential of the loss; infinite where that is too large for a number."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def loss_of(runner: Runner, documents: Documents, progress: Callable[[int], None] = lambda done: None) -> SetLoss:
    """The loss on all documents. `progress` is called with the number of those that are done."""
    total, count, groups = 0.0, 0, runner.sizes.groups
    for begin in range(0, len(documents), groups):
        rows = [_document(documents, index) for index in range(begin, min(begin + groups, len(documents)))]
        scores = runner.scores([tokens for tokens, _ in rows], 1)
        for (_, trained), found in zip(rows, scores, strict=True):
            total -= float(found.logprobs_S[trained].to(torch.float64).sum())
            count += int(trained.sum())
        progress(begin + len(rows))
    return SetLoss(total / count if count else math.nan, count, len(documents))


def _document(documents: Documents, index: int) -> tuple[Tensor, Tensor]:
    """The tokens of a document with the one behind it, and which of all but the first are trained."""
    start, end = int(documents.starts[index]), int(documents.starts[index] + documents.lengths[index])
    return torch.tensor(documents.tokens[start : end + 1], dtype=torch.int64), torch.tensor(
        documents.trained[start + 1 : end + 1]
    )
