"""The settings that the optimizers have in common, what they mean, and the check of their values."""

from typing import Literal

import torch
from torch import Tensor

from mpar.chain import Axes
from mpar.errors import ConfigError
from mpar.optim._learning_rate import LearningRate, learning_rate
from mpar.optim._norm import clip_factor
from mpar.optimizer import Optimizer

__all__ = ["ClippedOptimizer", "WeightDecayMask", "check_settings"]

WeightDecayMask = Literal["by_rank", "all"]
"""Which parameters decay. "by_rank": those of two or more dims that are not biases; "all": every one.

A bias may have two dims (`q_bias_NH` has one number for each head and feature), so the name is considered as well.
"""


class ClippedOptimizer(Optimizer):
    """An optimizer with the settings that all of mpar's have: a rate, a mask of weight decay, and a norm to which gradients are
    clipped (None: they are not)."""

    lr: LearningRate | float
    decay: WeightDecayMask
    clip_norm: float | None

    def decays(self, path: str, leaf: Tensor | Axes) -> bool:
        """Whether the parameter at `path` decays; `leaf` is its tensor (a meta one will do) or the tuple of its logical axes."""
        if self.decay == "all":
            return True
        rank = len(leaf.shape) if isinstance(leaf, Tensor) else len(leaf)
        return rank >= 2 and "bias" not in path.rpartition(".")[2]

    def rate(self, step: int) -> float:
        """The learning rate of update `step`, counted from 1."""
        return learning_rate(self.lr, step)

    def scale(self, norm: Tensor) -> Tensor:
        """The factor for gradients of global `norm`: the one that clips them to `clip_norm`, or 1."""
        return torch.ones_like(norm) if self.clip_norm is None else clip_factor(norm, self.clip_norm)


def check_settings(
    optimizer: object,
    *,
    lr: LearningRate | float,
    decay: WeightDecayMask,
    clip_norm: float | None,
    not_negative: dict[str, float],
    problems: list[str],
) -> None:
    """Raise ConfigError with a line for everything that is wrong with these settings, and with `problems` that the caller found.

    not_negative: further settings, by name, that must not be negative.
    """
    lines = [] if decay in ("by_rank", "all") else [f"decay must be 'by_rank' or 'all', not {decay!r}"]
    lines += problems
    bounds = not_negative if isinstance(lr, LearningRate) else {**not_negative, "lr": lr}
    lines += [f"{name} must not be negative, not {value}" for name, value in bounds.items() if not value >= 0]
    if clip_norm is not None and not clip_norm > 0:
        lines.append(f"clip_norm must be positive, not {clip_norm}; None does not clip")
    if lines:
        raise ConfigError(f"cannot make the optimizer {optimizer!r}:\n  " + "\n  ".join(lines))
