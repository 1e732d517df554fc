"""ORPO: the preferred answer is learned, and its odds are raised above those of the rejected one (Hong et al. 2024,
arXiv:2403.07691)."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mpar.errors import ConfigError
from mpar.tasks._answers import members_of, per_answer
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
    total,
)
from mpar.tasks._task import BY_ANSWER, Entry, Forwards, Means, Task

__all__ = ["Orpo"]


@dataclass(frozen=True, kw_only=True)
class Orpo(Task):
    """The mean over pairs of NLL(chosen) - beta log sigmoid(lo), where lo is by how much the logarithm of the odds p / (1 - p) of
    the preferred answer exceeds that of the rejected one, and log p is the mean log-probability of a token.

    prompt: whether NLL is the mean over all tokens of prompt and answer, as in the paper's code, or over those of the answer.
    beta: `data`: each pair has its own. Raises ConfigError if it is not above 0.
    """

    beta: FromData = 0.1
    prompt: bool = True

    def __post_init__(self) -> None:
        if self.beta != "data" and self.beta <= 0:
            raise ConfigError(f"cannot make a loss of odds: beta={self.beta} is not above 0")

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Answers and signs, and beta if each pair has its own."""
        return {**ANSWER_ENTRIES, **({"beta": Entry(BY_ANSWER)} if self.beta == "data" else {})}

    @property
    def reads_prompts(self) -> bool:
        """Whether the tokens of prompts are learned, too."""
        return self.prompt

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The number of pairs."""
        return num_pairs(batch)

    def loss(self, forwards: Forwards) -> tuple[Tensor, Means]:
        """The sum over pairs. Rewards are beta times the mean log-probability of a token."""
        batch, logps_BS = forwards.batch, forwards.policy.logps()
        scores, present_BP = answer_scores(logps_BS, batch), of_pairs(batch)
        beta = from_data(self.beta, batch.get("beta"), present_BP, scores.sums_BN)
        means = sides(torch.where(batch["signs"] >= 0, scores.means_BN, -1.0))  # the odds of log p = 0 are infinite
        log_odds = Sides(*(a - torch.log(-torch.expm1(a)) for a in (means.chosen, means.rejected)))
        ratio_BP = logsigmoid(log_odds.margin)
        nll_BP = -sides(self._all_tokens(logps_BS, batch) if self.prompt else scores.means_BN).chosen
        rewards = Sides(beta * means.chosen, beta * means.rejected)
        found = dict(pair_means(rewards, sides(scores.sums_BN), present_BP))
        count = found["logps/chosen"][1]
        found |= {name: (total(x, present_BP), count) for name, x in (("nll", nll_BP), ("log_odds", log_odds.margin))}
        return total(nll_BP - beta * ratio_BP, present_BP), found

    def _all_tokens(self, logps_BS: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """(B, N): the mean log-probability of all labels of the documents."""
        members_BSN = members_of(batch["documents"], batch["signs"].shape[1], logps_BS.dtype)
        labelled_BS = (batch["labels"] != -100).to(logps_BS.dtype)
        return per_answer(logps_BS, members_BSN) / per_answer(labelled_BS, members_BSN).clamp(min=1)
