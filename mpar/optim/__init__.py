"""Optimizers as pure functions of (gradients, state, parameters), learning rates, and the global norm.

Names are imported when they are first used, so that a learning rate is checked before torch is loaded.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpar.check_optimizer import check_optimizer
    from mpar.optim._adamw import AdamW
    from mpar.optim._classes import CLASSES
    from mpar.optim._learning_rate import WSD, Constant, Cosine, LearningRate, Linear, learning_rate
    from mpar.optim._lion import Lion
    from mpar.optim._muon import Muon, MuonMatrix
    from mpar.optim._norm import clip_factor, global_norm
    from mpar.optim._scaled_rates import ScaledRates
    from mpar.optim._settings import WeightDecayMask
    from mpar.optim._sgd import SGD
    from mpar.optim._soap import SOAP, SoapMatrix
    from mpar.optimizer import LeafRule, Optimizer, OptState

_HOME = {
    "CLASSES": "mpar.optim._classes",
    "AdamW": "mpar.optim._adamw",
    "Constant": "mpar.optim._learning_rate",
    "Cosine": "mpar.optim._learning_rate",
    "LearningRate": "mpar.optim._learning_rate",
    "LeafRule": "mpar.optimizer",
    "Linear": "mpar.optim._learning_rate",
    "Lion": "mpar.optim._lion",
    "Muon": "mpar.optim._muon",
    "MuonMatrix": "mpar.optim._muon",
    "OptState": "mpar.optimizer",
    "Optimizer": "mpar.optimizer",
    "SGD": "mpar.optim._sgd",
    "SOAP": "mpar.optim._soap",
    "ScaledRates": "mpar.optim._scaled_rates",
    "SoapMatrix": "mpar.optim._soap",
    "WSD": "mpar.optim._learning_rate",
    "WeightDecayMask": "mpar.optim._settings",
    "check_optimizer": "mpar.check_optimizer",
    "clip_factor": "mpar.optim._norm",
    "global_norm": "mpar.optim._norm",
    "learning_rate": "mpar.optim._learning_rate",
}

__all__ = [
    "CLASSES",
    "SGD",
    "SOAP",
    "WSD",
    "AdamW",
    "Constant",
    "Cosine",
    "LeafRule",
    "LearningRate",
    "Linear",
    "Lion",
    "Muon",
    "MuonMatrix",
    "OptState",
    "Optimizer",
    "ScaledRates",
    "SoapMatrix",
    "WeightDecayMask",
    "check_optimizer",
    "clip_factor",
    "global_norm",
    "learning_rate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mpar.optim' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
