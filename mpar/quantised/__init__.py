"""Quantised models: weights of few bits, which are frozen, and dequantised where a segment uses them.

`quantise` makes of a model another one of the same function, up to rounding; all that compiles, proves and predicts a model does
so for it. With adapters it is QLoRA: `quantise(adapters.add(model, LoRA(...)))`.
"""

from mpar.quantised._folder import QuantisedReader, is_quantised_folder, quantised_as, write_quantised
from mpar.quantised._layout import Kind, Layout
from mpar.quantised._model import ALL_LINEAR, QuantisedModel, quantise
from mpar.quantised._segment import QuantisedSegment, QuantisedWeight

__all__ = [
    "ALL_LINEAR",
    "Kind",
    "Layout",
    "QuantisedModel",
    "QuantisedReader",
    "QuantisedSegment",
    "QuantisedWeight",
    "is_quantised_folder",
    "quantise",
    "quantised_as",
    "write_quantised",
]
