"""Losses: the mean loss of a model on whole sets of data, in which each row counts once."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

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
    total, count = 0.0, 0
    for index in range(len(documents)):
        start, length = int(documents.starts[index]), int(documents.lengths[index])
        tokens = torch.tensor(documents.tokens[start : start + length + 1], dtype=torch.int64)
        trained = torch.tensor(documents.trained[start + 1 : start + length + 1])
        logprobs = runner.logits(tokens[:-1]).to(torch.float32).log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        total -= float(logprobs[trained].to(torch.float64).sum())
        count += int(trained.sum())
        progress(index + 1)
    return SetLoss(total / count if count else math.nan, count, len(documents))
