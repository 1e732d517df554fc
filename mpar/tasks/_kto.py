"""KTO: single answers, each good or bad, are compared with what the policy gains on answers to other questions (Ethayarajh et al.
2024, arXiv:2402.01306)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mpar.errors import ConfigError
from mpar.tasks._pairs import ANSWER_ENTRIES, answer_scores
from mpar.tasks._task import BY_ANSWER, Entry, Forwards, Means, Task

__all__ = ["MISMATCHED", "Kto"]

MISMATCHED = 2
"""The sign of an answer that belongs to another question, which only z0 reads."""


@dataclass(frozen=True, kw_only=True)
class Kto(Task):
    """The mean over answers of w (1 - sigmoid(beta (R - z0))) for good ones and of w (1 - sigmoid(beta (z0 - R))) for bad ones,
    where R = log p(answer) - log p_reference(answer).

    z0 is the mean of R over the mismatched answers, at least 0, and has no gradient. It is the one value that is of a microbatch,
    over all ranks, and so depends on how a step is cut.

    loss_type: `apo_zero_unpaired`: z0 is 0. desirable_weight, undesirable_weight: w. reference: as `Dpo` has it.
    Raises ConfigError with all values that are impossible.
    """

    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    reference: Literal["model", "columns"] = "model"

    def __post_init__(self) -> None:
        problems = [f"beta={self.beta} is not above 0"] * (self.beta <= 0)
        for name in ("desirable_weight", "undesirable_weight"):
            problems += [f"{name}={getattr(self, name)} is negative"] * (getattr(self, name) < 0)
        if problems:
            raise ConfigError("cannot make a loss of KTO:\n  " + "\n  ".join(problems))

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Answers and signs, and log-probabilities of the reference model if the batch has them."""
        return {**ANSWER_ENTRIES, **({"reference_logps": Entry(BY_ANSWER)} if self.reference == "columns" else {})}

    @property
    def compares(self) -> bool:
        """Whether a second forward gives the log-probabilities of the reference model."""
        return self.reference == "model"

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The number of answers that are good or bad."""
        return ((batch["signs"] == 1) | (batch["signs"] == 0)).sum()

    def loss(self, forwards: Forwards) -> tuple[Tensor, Means]:
        """The sum over answers; rewards are beta * R, `kl` is z0."""
        batch, signs_BN = forwards.batch, forwards.batch["signs"]
        sums_BN = answer_scores(forwards.policy.logps(), batch).sums_BN
        if self.reference == "columns":
            ratios_BN = sums_BN - batch["reference_logps"].to(sums_BN.dtype)
        else:
            assert forwards.reference is not None
            ratios_BN = sums_BN - answer_scores(forwards.reference.logps(), batch).sums_BN
        good_BN, bad_BN = signs_BN == 1, signs_BN == 0
        z0 = self._gain(ratios_BN, signs_BN == MISMATCHED)
        distance_BN = self.beta * (ratios_BN - z0)
        losses_BN = torch.where(good_BN, self.desirable_weight * (-distance_BN).sigmoid(), 0.0)
        losses_BN = losses_BN + torch.where(bad_BN, self.undesirable_weight * distance_BN.sigmoid(), 0.0)
        means = {"kl": (z0, torch.ones_like(z0))}
        for name, chosen_BN in (("chosen", good_BN), ("rejected", bad_BN)):
            count = chosen_BN.to(sums_BN.dtype).sum()
            means[f"rewards/{name}"] = torch.where(chosen_BN, self.beta * ratios_BN, 0.0).sum(), count
            means[f"logps/{name}"] = torch.where(chosen_BN, sums_BN, 0.0).sum(), count
        return losses_BN.sum(), means

    def _gain(self, ratios_BN: Tensor, mismatched_BN: Tensor) -> Tensor:
        """z0 of this microbatch."""
        total = torch.where(mismatched_BN, ratios_BN, 0.0).sum().detach()
        if self.loss_type == "apo_zero_unpaired":
            return torch.zeros_like(total)
        return (total / mismatched_BN.to(total.dtype).sum().clamp(min=1)).clamp(min=0)
