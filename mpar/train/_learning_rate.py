"""The learning rate of a configuration. This loads no torch."""

from typing import Any

from mpar.errors import ConfigError
from mpar.optim import WSD, Constant, Cosine, LearningRate, Linear
from mpar.train._config import OptimizerConfig

__all__ = ["make_learning_rate"]


def make_learning_rate(config: OptimizerConfig, steps: int) -> LearningRate:
    """The learning rate of a run of `steps` updates. Raises ConfigError, which lists everything that is wrong."""
    warmup: dict[str, Any] = {"total_steps": steps, "warmup_steps": config.warmup_steps}
    warmup["warmup_ratio"] = config.warmup_ratio if config.warmup_steps is None else None
    floor: dict[str, Any] = {"min_lr": config.min_lr, "min_ratio": config.min_ratio if config.min_lr is None else None}
    if config.lr_decay == "wsd":
        return WSD(lr=config.lr, **warmup, **floor, decay_ratio=config.decay_ratio)
    if config.decay_ratio is not None:
        raise ConfigError(f"optimizer.decay_ratio belongs to lr_decay=wsd; lr_decay is {config.lr_decay}")
    if config.lr_decay == "constant":
        return Constant(lr=config.lr, **warmup)
    return (Linear if config.lr_decay == "linear" else Cosine)(lr=config.lr, **warmup, **floor)
