"""Optimizers as pure functions of (gradients, state, parameters), learning-rate schedules, and the global norm."""

from mpar.optim._adamw import AdamW
from mpar.optim._norm import clip_factor, global_norm
from mpar.optim._schedule import WSD, Constant, Cosine, Linear, Schedule, learning_rate
from mpar.optim._settings import WeightDecayMask
from mpar.optim._sgd import SGD
from mpar.optimizer import Optimizer, OptState, check_optimizer

__all__ = [
    "SGD",
    "WSD",
    "AdamW",
    "Constant",
    "Cosine",
    "Linear",
    "OptState",
    "Optimizer",
    "Schedule",
    "WeightDecayMask",
    "check_optimizer",
    "clip_factor",
    "global_norm",
    "learning_rate",
]
