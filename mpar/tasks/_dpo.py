"""DPO and its kin: the policy prefers the better answer of a pair more than a reference model does.

DPO: Rafailov et al. 2023, arXiv:2305.18290. The reward of an answer is R = log p(answer) - log p_reference(answer), and
d = R_chosen - R_rejected. Sources of the other losses stand at each of them.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mpar.errors import ConfigError, UnknownNameError
from mpar.tasks._pairs import (
    ANSWER_ENTRIES,
    AnswerScores,
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
from mpar.tasks._task import BY_ANSWER, BY_TOKEN, Entry, Forwards, Means, Task

__all__ = ["DPO_LOSSES", "Dpo"]


@dataclass(frozen=True)
class _Pair:
    """What a loss reads, (B, P) each: `rewards` R, by how much they differ, `d`, the same of means over tokens, `mean_d`, the
    mean log-probability of a token of the preferred answer, beta, and the label smoothing."""

    rewards: Sides
    d: Tensor
    mean_d: Tensor
    chosen_mean: Tensor
    beta: Tensor | float
    smoothing: float


def _sigmoid(pair: _Pair) -> Tensor:
    """With label smoothing: cDPO (Mitchell 2023)."""
    return smoothed(pair.beta * pair.d, pair.smoothing)


def _robust(pair: _Pair) -> Tensor:
    """Chowdhury et al. 2024, arXiv:2403.00409."""
    scaled, e = pair.beta * pair.d, pair.smoothing
    return (-(1 - e) * logsigmoid(scaled) + e * logsigmoid(-scaled)) / (1 - 2 * e)


def _hinge(pair: _Pair) -> Tensor:
    """Zhao et al. 2023, arXiv:2305.10425, with rewards in place of log-probabilities."""
    return torch.relu(1 - pair.beta * pair.d)


def _ipo(pair: _Pair) -> Tensor:
    """Azar et al. 2023, arXiv:2310.12036, of means over tokens."""
    return (pair.mean_d - 1 / (2 * pair.beta)).square()


def _sigmoid_norm(pair: _Pair) -> Tensor:
    """DPO of means over tokens (Lambert et al. 2024, arXiv:2411.15124)."""
    return -logsigmoid(pair.beta * pair.mean_d)


def _exo_pair(pair: _Pair) -> Tensor:
    """Ji et al. 2024, arXiv:2402.00856; a smoothing of 0, whose loss is infinite, counts as 0.001."""
    scaled, e = pair.beta * pair.d, pair.smoothing or 1e-3
    return scaled.sigmoid() * (logsigmoid(scaled) - math.log1p(-e)) + (-scaled).sigmoid() * (logsigmoid(-scaled) - math.log(e))


def _nca_pair(pair: _Pair) -> Tensor:
    """Chen et al. 2024, arXiv:2402.05369, for two answers."""
    chosen, rejected = pair.beta * pair.rewards.chosen, pair.beta * pair.rewards.rejected
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def _bco_pair(pair: _Pair) -> Tensor:
    """Jung et al. 2024, arXiv:2404.04656, without a shift of the rewards."""
    return -logsigmoid(pair.beta * pair.rewards.chosen) - logsigmoid(-pair.beta * pair.rewards.rejected)


def _sppo_hard(pair: _Pair) -> Tensor:
    """Wu et al. 2024, arXiv:2405.00675."""
    return (pair.rewards.chosen - 0.5 / pair.beta).square() + (pair.rewards.rejected + 0.5 / pair.beta).square()


def _apo_zero(pair: _Pair) -> Tensor:
    """D'Oosterlinck et al. 2024, arXiv:2408.06266."""
    return 1 - (pair.beta * pair.rewards.chosen).sigmoid() + (pair.beta * pair.rewards.rejected).sigmoid()


def _apo_down(pair: _Pair) -> Tensor:
    """D'Oosterlinck et al. 2024, arXiv:2408.06266."""
    return (pair.beta * pair.rewards.chosen).sigmoid() + 1 - (pair.beta * pair.d).sigmoid()


def _discopop(pair: _Pair) -> Tensor:
    """Lu et al. 2024, arXiv:2406.08414, with a temperature of 0.05."""
    scaled = pair.beta * pair.d
    mix = (scaled / 0.05).sigmoid()
    return -(1 - mix) * logsigmoid(scaled) + mix * (-scaled).exp()


def _sft(pair: _Pair) -> Tensor:
    """Minus the mean log-probability of a token of the preferred answer."""
    return -pair.chosen_mean


DPO_LOSSES: Mapping[str, Callable[[_Pair], Tensor]] = {
    "sigmoid": _sigmoid,
    "robust": _robust,
    "hinge": _hinge,
    "ipo": _ipo,
    "sigmoid_norm": _sigmoid_norm,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
    "sft": _sft,
}


@dataclass(frozen=True, kw_only=True)
class Dpo(Task):
    """Losses of pairs, each the mean over all pairs of the step.

    losses: names in DPO_LOSSES, with the weight of each. beta: how strongly the policy is held to the reference model; `data`:
        each pair has its own, in the column `beta`. label_smoothing: the share of pairs that may be labelled wrongly.
    rpo_alpha: adds so much of the loss `sft`. ld_alpha: see `answer_scores`. divergence: what holds the policy to the reference
        model: rewards are g(R) in place of R (Wang et al. 2023, arXiv:2309.16240); divergence_alpha: of `alpha`.
    reference: `model`: a second forward of the same program gives the log-probabilities of the reference model; `columns`: the
        batch has them, in the entry `reference_logps` (B, N), for each answer the sum that `answer_scores` gives; `none`: R is
        log p(answer).
    Raises ConfigError with all values that are impossible.
    """

    losses: tuple[tuple[str, float], ...] = (("sigmoid", 1.0),)
    beta: FromData = 0.1
    label_smoothing: float = 0.0
    rpo_alpha: float = 0.0
    ld_alpha: float | None = None
    divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl"
    divergence_alpha: float = 0.5
    reference: Literal["model", "columns", "none"] = "model"

    def __post_init__(self) -> None:
        unknown = [name for name, _ in self.losses if name not in DPO_LOSSES]
        if unknown:
            raise UnknownNameError(f"there is no loss of pairs called {', '.join(unknown)}; there are {', '.join(DPO_LOSSES)}")
        problems = [f"beta={self.beta} is not above 0"] * (self.beta != "data" and self.beta <= 0)
        problems += [f"label_smoothing={self.label_smoothing} is not in [0, 0.5)"] * (not 0 <= self.label_smoothing < 0.5)
        problems += [f"ld_alpha={self.ld_alpha} is not in [0, 1]"] * (self.ld_alpha is not None and not 0 <= self.ld_alpha <= 1)
        problems += ["there is no loss"] * (not self.losses)
        problems += ["divergence_alpha is 1, where the divergence is not defined"] * (self.divergence_alpha == 1)
        if problems:
            raise ConfigError("cannot make a loss of pairs:\n  " + "\n  ".join(problems))

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Answers and signs, and what the options read."""
        entries = dict(ANSWER_ENTRIES)
        if self.beta == "data":
            entries["beta"] = Entry(BY_ANSWER)
        if self.ld_alpha is not None:
            entries["indices"] = Entry(BY_TOKEN, torch.int64)
        if self.reference == "columns":
            entries["reference_logps"] = Entry(BY_ANSWER)
        return entries

    @property
    def compares(self) -> bool:
        """Whether a second forward gives the log-probabilities of the reference model."""
        return self.reference == "model"

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The number of pairs."""
        return num_pairs(batch)

    def loss(self, forwards: Forwards) -> tuple[Tensor, Means]:
        """The sum over pairs; metrics are means over pairs, rewards are beta * R."""
        batch = forwards.batch
        policy = answer_scores(forwards.policy.logps(), batch, self.ld_alpha)
        reference_BN = torch.zeros_like(policy.sums_BN)
        if self.reference == "columns":
            reference_BN = batch["reference_logps"].to(policy.sums_BN.dtype)
        elif forwards.reference is not None:
            reference_BN = answer_scores(forwards.reference.logps(), batch, self.ld_alpha).sums_BN
        present_BP = of_pairs(batch)
        pair = self.pair(policy, reference_BN, batch.get("beta"), present_BP)
        losses_BP = sum(weight * DPO_LOSSES[name](pair) for name, weight in self.losses) + self.rpo_alpha * _sft(pair)
        rewards = Sides(*(pair.beta * reward for reward in (pair.rewards.chosen, pair.rewards.rejected)))
        means = pair_means(rewards, sides(policy.sums_BN), present_BP)
        return total(losses_BP, present_BP), means

    def pair(self, policy: AnswerScores, reference_BN: Tensor, beta_BN: Tensor | None, present_BP: Tensor) -> _Pair:
        """What a loss reads, made of log-probabilities by both models."""
        ratios_BN = policy.sums_BN - reference_BN
        rewards = sides(self._held(ratios_BN))
        beta = from_data(self.beta, beta_BN, present_BP, ratios_BN)
        mean_d = sides(ratios_BN / policy.lengths_BN).margin
        return _Pair(rewards, rewards.margin, mean_d, sides(policy.means_BN).chosen, beta, self.label_smoothing)

    def _held(self, ratios_BN: Tensor) -> Tensor:
        """g(R) of the divergence."""
        if self.divergence == "forward_kl":
            return 1 - (-ratios_BN).exp()
        if self.divergence == "js":
            return math.log(2) + logsigmoid(ratios_BN)
        if self.divergence == "alpha":
            power = self.divergence_alpha - 1
            return torch.expm1(power * ratios_BN) / power
        return ratios_BN
