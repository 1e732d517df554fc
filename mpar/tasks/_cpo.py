"""Losses of pairs without a reference model, of log-probabilities themselves: CPO and SimPO.

CPO: Xu et al. 2024, arXiv:2401.08417. SimPO: Meng et al. 2024, arXiv:2405.14734. a is the mean log-probability of a token of an
answer, lp their sum.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mpar.errors import ConfigError
from mpar.tasks._pairs import (
    ANSWER_ENTRIES,
    FromData,
    Sides,
    answer_scores,
    from_data,
    num_pairs,
    of_pairs,
    pair_means,
    sides,
    smoothed,
    total,
)
from mpar.tasks._task import BY_ANSWER, Entry, Forwards, Means, Task

__all__ = ["Cpo"]


@dataclass(frozen=True, kw_only=True)
class Cpo(Task):
    """The mean over pairs of a loss of how much more likely the preferred answer is, plus `cpo_alpha` times minus the mean
    log-probability of a token of it.

    loss: `sigmoid`: -log sigmoid(beta (lp_chosen - lp_rejected)). `hinge`: relu(1 - the same difference times beta). `ipo`: the
        square of (a_chosen - a_rejected - 1 / (2 beta)). `simpo`: -log sigmoid(beta (a_chosen - a_rejected) - gamma).
    beta: `data`: each pair has its own. label_smoothing: of `sigmoid` and `simpo`.
    Raises ConfigError with all values that are impossible.
    """

    loss_type: Literal["sigmoid", "hinge", "ipo", "simpo"] = "sigmoid"
    beta: FromData = 0.1
    gamma: float = 0.5
    cpo_alpha: float = 1.0
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        problems = [f"beta={self.beta} is not above 0"] * (self.beta != "data" and self.beta <= 0)
        problems += [f"label_smoothing={self.label_smoothing} is not in [0, 0.5)"] * (not 0 <= self.label_smoothing < 0.5)
        problems += [f"{name}={getattr(self, name)} is negative" for name in ("gamma", "cpo_alpha") if getattr(self, name) < 0]
        if problems:
            raise ConfigError("cannot make a loss of pairs:\n  " + "\n  ".join(problems))

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Answers and signs, and beta if each pair has its own."""
        return {**ANSWER_ENTRIES, **({"beta": Entry(BY_ANSWER)} if self.beta == "data" else {})}

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The number of pairs."""
        return num_pairs(batch)

    def loss(self, forwards: Forwards) -> tuple[Tensor, Means]:
        """The sum over pairs. Rewards are beta times what the loss compares; `nll` is that of the preferred answer."""
        batch = forwards.batch
        scores, present_BP = answer_scores(forwards.policy.logps(), batch), of_pairs(batch)
        beta = from_data(self.beta, batch.get("beta"), present_BP, scores.sums_BN)
        compared = sides(scores.means_BN if self.loss_type in ("ipo", "simpo") else scores.sums_BN)
        rewards = Sides(beta * compared.chosen, beta * compared.rejected)
        nll_BP = -sides(scores.means_BN).chosen
        losses_BP = self._compare(compared.margin, beta) + self.cpo_alpha * nll_BP
        means = dict(pair_means(rewards, sides(scores.sums_BN), present_BP))
        means["nll"] = total(nll_BP, present_BP), means["logps/chosen"][1]
        return total(losses_BP, present_BP), means

    def _compare(self, margin_BP: Tensor, beta: Tensor | float) -> Tensor:
        if self.loss_type == "hinge":
            return torch.relu(1 - beta * margin_BP)
        if self.loss_type == "ipo":
            return (margin_BP - 1 / (2 * beta)).square()
        return smoothed(beta * margin_BP - (self.gamma if self.loss_type == "simpo" else 0.0), self.label_smoothing)
