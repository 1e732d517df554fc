"""Advantages: by how much an answer is better than the others to the same prompt."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from mpar.rollouts._rollout import Rollout
from mpar.tasks import gae, token_rewards, whitened

__all__ = ["Baseline", "Scale", "TokenAdvantages", "advantages", "is_even", "with_token_advantages"]

Scale = Literal["group", "batch", "none"]
Baseline = Literal["mean", "others"]
_EPSILON = 1e-4  # as TRL and ms-swift have it: groups of nearly equal rewards do not explode


@dataclass(frozen=True)
class TokenAdvantages:
    """How advantages of tokens are made: beta, gamma and lam are those of `mpar.tasks.Ppo`."""

    beta: float
    gamma: float
    lam: float


def with_token_advantages(rollouts: Sequence[Rollout], counted: Sequence[bool], how: TokenAdvantages) -> list[Rollout]:
    """The rollouts with `token_advantages` and `returns` of their tokens, from `values`, and with beta also `reference_logps`.

    Rewards of tokens, advantages and returns are those of `token_rewards` and `gae`. Advantages are then `whitened` over the
    tokens of all rollouts that are counted; the others have none.
    """
    lengths_R = torch.tensor([len(rollout.answer_ids) for rollout in rollouts])
    scores_R = torch.tensor([rollout.reward or 0.0 for rollout in rollouts], dtype=torch.float64)
    logps_RS = _padded([rollout.logps for rollout in rollouts])
    values_RS = _padded([rollout.of_tokens["values"] for rollout in rollouts])
    reference_RS = _padded([rollout.of_tokens["reference_logps"] for rollout in rollouts]) if how.beta else logps_RS
    rewards_RS = token_rewards(scores_R, logps_RS, reference_RS, lengths_R, beta=how.beta)
    advantages_RS, returns_RS = gae(rewards_RS, values_RS, gamma=how.gamma, lam=how.lam)
    inside_RS = torch.arange(logps_RS.shape[1]) < lengths_R[:, None]
    advantages_RS = whitened(advantages_RS, inside_RS & torch.tensor(counted)[:, None])
    return [
        replace(
            rollout,
            of_tokens={
                **rollout.of_tokens,
                "token_advantages": tuple(advantages_RS[row, : len(rollout.answer_ids)].tolist()),
                "returns": tuple(returns_RS[row, : len(rollout.answer_ids)].tolist()),
            },
        )
        for row, rollout in enumerate(rollouts)
    ]


def _padded(rows: Sequence[Sequence[float]]) -> Tensor:
    """(R, S): the numbers of each row, and zeros."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.float64) for row in rows], batch_first=True)


def advantages(rewards: Sequence[Sequence[float | None]], scale: Scale, baseline: Baseline = "mean") -> list[list[float]]:
    """The advantage of each answer of each group; 0 for answers without a reward, which count for nothing.

    baseline: what is subtracted from a reward: the `mean` of its group, or that of the `others` of the group (RLOO).
    scale: what the difference is divided by: the standard deviation (unbiased) of the `group`, or of the `batch`, plus 1e-4;
    `none`: nothing (Dr. GRPO).
    """
    present = [[reward for reward in group if reward is not None] for group in rewards]
    of_batch = _deviation([reward for group in present for reward in group])
    return [
        [_advantage(reward, kept, baseline) / _divisor(scale, kept, of_batch) for reward in group]
        for group, kept in zip(rewards, present, strict=True)
    ]


def is_even(rewards: Sequence[float | None]) -> bool:
    """Whether a group has nothing to learn from: no two different rewards."""
    return len({reward for reward in rewards if reward is not None}) < 2


def _advantage(reward: float | None, kept: Sequence[float], baseline: Baseline) -> float:
    if reward is None or len(kept) < 2:
        return 0.0
    if baseline == "mean":
        return reward - math.fsum(kept) / len(kept)
    return reward - (math.fsum(kept) - reward) / (len(kept) - 1)


def _divisor(scale: Scale, kept: Sequence[float], of_batch: float) -> float:
    return 1.0 if scale == "none" else (of_batch if scale == "batch" else _deviation(kept)) + _EPSILON


def _deviation(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
