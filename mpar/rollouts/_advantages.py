"""Advantages: by how much an answer is better than the others to the same prompt."""

import math
from collections.abc import Sequence
from typing import Literal

__all__ = ["Baseline", "Scale", "advantages", "is_even"]

Scale = Literal["group", "batch", "none"]
Baseline = Literal["mean", "others"]
_EPSILON = 1e-4  # as TRL and ms-swift have it: groups of nearly equal rewards do not explode


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
