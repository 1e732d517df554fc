"""Dynamic fine-tuning: the loss of a token is weighed by its own probability (Wu et al. 2025, arXiv:2508.05629)."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mpar.tasks._task import Entry, Forwards, Means, Task

__all__ = ["Dft"]


@dataclass(frozen=True)
class Dft(Task):
    """Minus p log p of each label, where p has no gradient, times its weight. Its batches are those of fine-tuning."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """None besides those of the model."""
        return {}

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The weights of all labels, which are 1 if the batch does not say more."""
        return _weights(batch).sum()

    def loss(self, forwards: Forwards) -> tuple[Tensor, Means]:
        """The sum over labels; `nll` is the mean of -log p."""
        logps_BS, weights_BS = forwards.policy.logps(), _weights(forwards.batch)
        nll_BS = -logps_BS * weights_BS
        return (nll_BS * logps_BS.exp().detach()).sum(), {"nll": (nll_BS.sum(), weights_BS.to(logps_BS.dtype).sum())}


def _weights(batch: Mapping[str, Tensor]) -> Tensor:
    counted_BS = batch["labels"] != -100
    weights_BS = batch.get("token_weights")
    return counted_BS if weights_BS is None else torch.where(counted_BS, weights_BS, 0.0)
