"""The classes that mpar's own optimizers consist of; `Program.to_plain` and `Program.from_plain` ask for them."""

from mpar.optim._adamw import AdamW
from mpar.optim._learning_rate import WSD, Constant, Cosine, Linear
from mpar.optim._lion import Lion
from mpar.optim._muon import Muon
from mpar.optim._scaled_rates import ScaledRates
from mpar.optim._sgd import SGD
from mpar.optim._soap import SOAP

__all__ = ["CLASSES"]

CLASSES = (AdamW, SGD, Lion, Muon, SOAP, ScaledRates, Constant, Linear, Cosine, WSD)
