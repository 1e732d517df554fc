"""The quantised weights of a configuration: what they make of the model, and of what is read of its folders and checkpoints."""

from collections.abc import Callable

from torch import Tensor

from mpar.models import Trainable
from mpar.quantised import QuantisedModel, quantise
from mpar.train._config import ModelConfig

__all__ = ["dequantised", "quantised", "quantised_part"]

ReadLeaf = Callable[[str], Tensor]


def quantised(group: ModelConfig, model: Trainable) -> Trainable:
    """`model` with quantised weights, if the configuration asks for them. Raises ConfigError."""
    return model if group.quantise is None else quantise(model, group.quantise, exclude=group.quantise_exclude)


def quantised_part(model: Trainable) -> QuantisedModel | None:
    """The quantised model that `model` is, or is made of; None if there is none."""
    while not isinstance(model, QuantisedModel):
        base = getattr(model, "base", None)
        if not isinstance(base, Trainable):
            return None
        model = base
    return model


def dequantised(model: Trainable, read: ReadLeaf) -> ReadLeaf:
    """What gives whole weights, where `read` gives the leaves of `model`, among which are parts of quantised ones."""
    made = quantised_part(model)
    return read if made is None else lambda path: made.base_leaf(path, read)
