"""Advantages: by how much an answer is better than the others to the same prompt."""

import itertools
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

    Rewards of tokens, advantages and returns are those of `token_rewards` and `gae`, over the tokens that the policy wrote; those
    of an environment, which have 0, are a part of what follows. Advantages are then `whitened` over the tokens of all rollouts
    that are counted; the others have none.
    """
    lengths_R = torch.tensor([rollout.num_drawn for rollout in rollouts])
    scores_R = torch.tensor([rollout.reward or 0.0 for rollout in rollouts], dtype=torch.float64)
    logps_RS = _padded([_of_drawn(rollout, rollout.logps) for rollout in rollouts])
    values_RS = _padded([_of_drawn(rollout, rollout.of_tokens["values"]) for rollout in rollouts])
    known = [rollout.of_tokens["reference_logps"] if how.beta else rollout.logps for rollout in rollouts]
    reference_RS = _padded([_of_drawn(rollout, numbers) for rollout, numbers in zip(rollouts, known, strict=True)])
    rewards_RS = token_rewards(scores_R, logps_RS, reference_RS, lengths_R, beta=how.beta)
    advantages_RS, returns_RS = gae(rewards_RS, values_RS, gamma=how.gamma, lam=how.lam)
    inside_RS = torch.arange(logps_RS.shape[1]) < lengths_R[:, None]
    advantages_RS = whitened(advantages_RS, inside_RS & torch.tensor(counted)[:, None])
    return [
        replace(
            rollout,
            of_tokens={
                **rollout.of_tokens,
                "token_advantages": _of_all(rollout, advantages_RS[row]),
                "returns": _of_all(rollout, returns_RS[row]),
            },
        )
        for row, rollout in enumerate(rollouts)
    ]


def _of_drawn(rollout: Rollout, numbers: Sequence[float]) -> list[float]:
    """The numbers of those tokens that the policy wrote."""
    return list(itertools.compress(numbers, rollout.drawn))


def _of_all(rollout: Rollout, numbers_S: Tensor) -> tuple[float, ...]:
    """For each token behind the prompt its number, 0 for those of the environment; `numbers_S` has those of the others."""
    of_drawn = iter(numbers_S.tolist())
    return tuple(next(of_drawn) if drawn else 0.0 for drawn in rollout.drawn)


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
