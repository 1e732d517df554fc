"""Optimizers as pure functions of (gradients, state, parameters), learning rates, and the global norm."""

from mpar.optim._adamw import AdamW
from mpar.optim._learning_rate import WSD, Constant, Cosine, LearningRate, Linear, learning_rate
from mpar.optim._norm import clip_factor, global_norm
from mpar.optim._settings import WeightDecayMask
from mpar.optim._sgd import SGD
from mpar.optimizer import Optimizer, OptState, check_optimizer

__all__ = [
    "SGD",
    "WSD",
    "AdamW",
    "Constant",
    "Cosine",
    "LearningRate",
    "Linear",
    "OptState",
    "Optimizer",
    "WeightDecayMask",
    "check_optimizer",
    "clip_factor",
    "global_norm",
    "learning_rate",
]
