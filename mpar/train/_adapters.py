"""The adapters of a configuration: what they make of the model, of its optimizer, and of its folders."""

from dataclasses import asdict, replace

from mpar.adapters import AdaptedModel, LoRA, add
from mpar.models import Trainable, WrappedModel
from mpar.optim import Optimizer, ScaledRates
from mpar.train._config import AdapterConfig

__all__ = ["adapted", "adapted_part", "with_rates", "without_adapters"]


def adapted(group: AdapterConfig, model: Trainable) -> Trainable:
    """`model` with the adapter that the configuration describes; `model` itself if it describes none. Raises ConfigError."""
    if group.kind is None:
        return model
    return add(model, LoRA(**{name: value for name, value in asdict(group).items() if name != "kind"}))


def without_adapters(model: Trainable) -> Trainable:
    """`model` without its adapters, whose parameters are some of those of `model`; it may be quantised as `model` is."""
    if isinstance(model, AdaptedModel):
        return model.base
    assert isinstance(model, WrappedModel), "it has no adapters"
    return replace(model, base=without_adapters(model.base))  # type: ignore[type-var]  # every subclass is a dataclass


def with_rates(group: AdapterConfig, optimizer: Optimizer) -> Optimizer:
    """`optimizer` with the learning rate of B that the configuration asks for."""
    if group.kind is None or group.b_rate == 1:
        return optimizer
    return ScaledRates(optimizer, (("adapters.*.b", group.b_rate),))


def adapted_part(model: Trainable) -> AdaptedModel | None:
    """The model with adapters that `model` is, or is made of; None if there is none."""
    while not isinstance(model, AdaptedModel):
        base = getattr(model, "base", None)
        if not isinstance(base, Trainable):
            return None
        model = base
    return model
