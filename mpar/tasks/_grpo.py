"""GRPO and its kin: the policy moves towards answers that were better than others to the same prompt.

GRPO: Shao et al. 2024, arXiv:2402.03300, eq. 3 and 4. DAPO: Yu et al. 2025, arXiv:2503.14476, eq. 8. Dr. GRPO: Liu et al. 2025,
arXiv:2503.20783. GSPO: Zheng et al. 2025, arXiv:2507.18071, eq. 5. CISPO: MiniMax 2025, arXiv:2506.13585. RLOO: Ahmadian et al.
2024, arXiv:2402.14740. Advantages come with the data, so the loss of a token depends on its own answer alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mpar.errors import ConfigError
from mpar.tasks._answers import members_of, per_answer, per_token
from mpar.tasks._task import BY_ANSWER, BY_TOKEN, Entry, Forwards, Means, Task

__all__ = ["Grpo", "GrpoLoss", "GrpoTokens", "Ratio", "Reduction", "grpo_loss"]

Reduction = Literal["grpo", "bnpo", "dapo", "dr_grpo", "cispo"]
Ratio = Literal["token", "sequence", "sequence_token", "sequence_sum"]


@dataclass(frozen=True, kw_only=True)
class GrpoLoss:
    """What the loss of a token is, and how the losses of tokens are added up.

    loss_type: `grpo`: the mean over answers of the mean over their tokens. `dapo`, and `bnpo`, which differs only where batches
        are cut: the mean over all tokens of the batch. `dr_grpo`: the sum over tokens, divided by `max_tokens` and by the
        number of answers. `cispo`: as dapo, but the gradient is that of the log-probability, weighed by the ratio, which is cut
        off at `epsilon_high` and has no gradient itself.
    ratio: of what probabilities are compared with those when the answer was drawn. `token`: each token. `sequence`: the answer,
        by the mean of its tokens' log-probabilities (GSPO). `sequence_token`: the same value, with the gradient of the token.
        `sequence_sum`: the answer, by their sum (RLOO).
    epsilon, epsilon_high: a ratio counts within [1 - epsilon, 1 + epsilon_high]; None: the same upwards. delta: also the
        side that is not clipped counts only up to this ratio (two-sided clipping).
    beta: the weight of the divergence from the reference model, by the estimator k3 (Schulman 2020). weigh_kl: multiply it by
        the ratio, which makes its gradient that of the divergence.
    correction: where the sampler is not the trainer, tokens weigh as much more or less as the trainer's probability is higher:
        each `token` or the product over the `sequence`, `truncate`d at `max_correction`, or, with `mask`, 0 above that.
    max_tokens: the most tokens of an answer, for `dr_grpo`.
    Raises ConfigError with all values that are impossible.
    """

    loss_type: Reduction = "dapo"
    ratio: Ratio = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    weigh_kl: bool = False
    correction: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None = None
    max_correction: float = 3.0
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        problems = [f"{name}={getattr(self, name)} is negative" for name in ("epsilon", "beta") if getattr(self, name) < 0]
        if self.loss_type == "cispo" and self.epsilon_high is None:
            problems.append("loss_type=cispo needs epsilon_high, the highest weight of a token, such as 5")
        if self.loss_type == "cispo" and (self.delta is not None or self.ratio != "token"):
            problems.append("loss_type=cispo weighs tokens by their own ratio: ratio is token, and delta is not used")
        if self.loss_type == "dr_grpo" and self.max_tokens is None:
            problems.append("loss_type=dr_grpo needs max_tokens, by which it divides")
        if self.delta is not None and self.delta <= 1 + self.high:
            problems.append(f"delta={self.delta} is not above 1 + epsilon_high = {1 + self.high:g}, so it would clip all")
        if problems:
            raise ConfigError("cannot make a loss of GRPO:\n  " + "\n  ".join(problems))

    @property
    def high(self) -> float:
        """By how much a ratio may exceed 1."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def per_token(self) -> bool:
        """Whether the loss is divided by the number of tokens; else by that of answers."""
        return self.loss_type in ("bnpo", "dapo", "cispo")


@dataclass(frozen=True)
class GrpoTokens:
    """What the loss reads of a batch. `answers_BS`: the index in its row of the answer for which the label at a position counts,
    or -1; `advantages_BN`: of each answer of a row. Log-probabilities are of the labels: `old_logps_BS` when the answer was
    drawn, by the trainer's forward; `reference_logps_BS` by the reference model, for `beta`; `rollout_logps_BS` by the sampler,
    for `correction`.
    """

    answers_BS: Tensor
    advantages_BN: Tensor
    old_logps_BS: Tensor
    reference_logps_BS: Tensor | None = None
    rollout_logps_BS: Tensor | None = None


def grpo_loss(loss: GrpoLoss, logps_BS: Tensor, of: GrpoTokens) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum of the losses, and sums over tokens of what is worth seeing: `clipped_low`, `clipped_high`, `ratio`, `kl`.

    logps_BS: log-probabilities of the labels by the policy. The sum is to be divided by the number of tokens or of answers, as
    `loss.per_token` says.
    """
    members_BSN = members_of(of.answers_BS, of.advantages_BN.shape[1], logps_BS.dtype)
    counted_BS = of.answers_BS >= 0
    lengths_BN = per_answer(counted_BS.to(logps_BS.dtype), members_BSN).clamp(min=1)
    change_BS = torch.where(counted_BS, logps_BS - of.old_logps_BS, 0.0)
    ratio_BS = _ratio(loss, change_BS, members_BSN, lengths_BN).exp()
    advantages_BS = per_token(of.advantages_BN, members_BSN)
    losses_BS = _policy_losses(loss, logps_BS, ratio_BS, advantages_BS)
    if loss.correction is not None:
        losses_BS = losses_BS * _correction(loss, of, counted_BS, members_BSN)
    metrics = {
        "clipped_low": _sum_where(counted_BS & (ratio_BS < 1 - loss.epsilon) & (advantages_BS < 0)),
        "clipped_high": _sum_where(counted_BS & (ratio_BS > 1 + loss.high) & (advantages_BS > 0)),
        "ratio": torch.where(counted_BS, ratio_BS.detach(), 0.0).sum(),
    }
    if loss.beta:
        assert of.reference_logps_BS is not None
        behind_BS = torch.where(counted_BS, of.reference_logps_BS - logps_BS, 0.0)
        kl_BS = behind_BS.exp() - behind_BS - 1
        metrics["kl"] = kl_BS.detach().sum()
        losses_BS = losses_BS + loss.beta * (kl_BS * ratio_BS if loss.weigh_kl else kl_BS)
    return _reduced(loss, torch.where(counted_BS, losses_BS, 0.0), members_BSN, lengths_BN), metrics


def _ratio(loss: GrpoLoss, change_BS: Tensor, members_BSN: Tensor, lengths_BN: Tensor) -> Tensor:
    """The logarithm of the ratio that counts for each token."""
    if loss.ratio == "token":
        return change_BS
    sums_BN = per_answer(change_BS, members_BSN)
    shared_BS = per_token(sums_BN if loss.ratio == "sequence_sum" else sums_BN / lengths_BN, members_BSN)
    return shared_BS.detach() + change_BS - change_BS.detach() if loss.ratio == "sequence_token" else shared_BS


def _policy_losses(loss: GrpoLoss, logps_BS: Tensor, ratio_BS: Tensor, advantages_BS: Tensor) -> Tensor:
    if loss.loss_type == "cispo":
        return -ratio_BS.clamp(max=loss.high).detach() * advantages_BS * logps_BS
    clipped_BS = ratio_BS.clamp(1 - loss.epsilon, 1 + loss.high)
    bounded_BS = ratio_BS if loss.delta is None else ratio_BS.clamp(max=loss.delta)
    return -torch.minimum(bounded_BS * advantages_BS, clipped_BS * advantages_BS)


def _correction(loss: GrpoLoss, of: GrpoTokens, counted_BS: Tensor, members_BSN: Tensor) -> Tensor:
    """How much each token weighs because the sampler is not the trainer; it has no gradient."""
    assert loss.correction is not None and of.rollout_logps_BS is not None
    excess_BS = torch.where(counted_BS, of.old_logps_BS - of.rollout_logps_BS, 0.0)
    if loss.correction.startswith("sequence"):
        excess_BS = per_token(per_answer(excess_BS, members_BSN), members_BSN)
    weight_BS = excess_BS.exp()
    if loss.correction.endswith("truncate"):
        return weight_BS.clamp(max=loss.max_correction)
    return torch.where(weight_BS > loss.max_correction, 0.0, weight_BS)


def _reduced(loss: GrpoLoss, losses_BS: Tensor, members_BSN: Tensor, lengths_BN: Tensor) -> Tensor:
    if loss.loss_type == "grpo":
        return (per_answer(losses_BS, members_BSN) / lengths_BN).sum()
    return losses_BS.sum() / (loss.max_tokens or 1) if loss.loss_type == "dr_grpo" else losses_BS.sum()


def _sum_where(chosen_BS: Tensor) -> Tensor:
    return chosen_BS.to(torch.float32).sum()


@dataclass(frozen=True, kw_only=True)
class Grpo(Task, GrpoLoss):
    """GRPO and its kin as a task, with the options of `GrpoLoss`.

    bar: log-probabilities of a policy that has not moved since the answers were drawn should differ by less; the metric `apart`
        is the share of tokens that differ by more, `gap` the mean difference, `gap_highest` the largest.
    """

    bar: float = 0.01

    @property
    def entries(self) -> Mapping[str, Entry]:
        """answers, signs: as with other tasks; signs are 1 where there is an answer. advantages (B, N): by how much it is better
        than its group. old_logps (B, S): of each label when it was drawn; rollout_logps (B, S): by a sampler that is not the
        trainer.
        """
        columns = {"signs": Entry(BY_ANSWER, torch.int64), "advantages": Entry(BY_ANSWER)}
        positions = {"answers": Entry(BY_TOKEN, torch.int64), "old_logps": Entry(BY_TOKEN)}
        others = {} if self.correction is None else {"rollout_logps": Entry(BY_TOKEN)}
        return {**columns, **positions, **others}

    @property
    def compares(self) -> bool:
        """With `beta`, it stays near a reference model."""
        return self.beta > 0

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The number of tokens of answers, or that of answers."""
        return (batch["answers"] >= 0).sum() if self.per_token else (batch["signs"] >= 0).sum()

    def loss(self, forwards: Forwards) -> tuple[Tensor, Means]:
        """See `grpo_loss`."""
        batch, logps_BS = forwards.batch, forwards.policy.logps()
        floats = {key: batch[key].to(logps_BS.dtype) for key in ("advantages", "old_logps", "rollout_logps") if key in batch}
        reference_BS = None if forwards.reference is None else forwards.reference.logps()
        of = GrpoTokens(batch["answers"], floats["advantages"], floats["old_logps"], reference_BS, floats.get("rollout_logps"))
        loss, sums = grpo_loss(self, logps_BS, of)
        counted_BS = batch["answers"] >= 0
        gap_BS = torch.where(counted_BS, logps_BS.detach() - of.old_logps_BS, 0.0).abs()
        sums |= {"gap": gap_BS.sum(), "apart": _sum_where(gap_BS > self.bar)}
        means: dict[str, tuple[Tensor, ...]] = {name: (total, counted_BS.sum()) for name, total in sums.items()}
        return loss, {**means, "gap_highest": (gap_BS.amax(),)}
