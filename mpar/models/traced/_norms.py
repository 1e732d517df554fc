"""Norms of a traced model: those that equal a primitive on random numbers are replaced by it."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mpar.models.layers import NormConfig, normalise

__all__ = ["replace_norms"]

CANDIDATES = (NormConfig("rms_norm"), NormConfig("rms_norm", offset=1.0), NormConfig("layer_norm", bias=True))


def replace_norms(module: nn.Module) -> None:
    """Let each norm in `module` whose result equals that of a primitive call the primitive. What is no norm stays as it is."""
    found: dict[Any, NormConfig | None] = {}
    for part in module.modules():
        if "norm" not in type(part).__name__.lower() or next(part.children(), None) is not None:
            continue
        if len(inspect.signature(part.forward).parameters) != 1:  # one with a gate, for example
            continue
        parameters = dict(part.named_parameters(recurse=False))
        if set(parameters) not in ({"weight"}, {"weight", "bias"}) or parameters["weight"].ndim != 1:
            continue
        for eps in _epsilons(part):
            key = (type(part), tuple(parameters), parameters["weight"].shape, eps)
            if key not in found:
                found[key] = _equal(part, parameters, eps)
            norm = found[key]
            if norm is not None:
                _replace(part, norm)
                break


def _epsilons(part: nn.Module) -> Iterator[float]:
    for name in ("variance_epsilon", "eps", "epsilon", "norm_eps"):
        value = getattr(part, name, None)
        if isinstance(value, float):
            yield value


def _equal(part: nn.Module, parameters: Mapping[str, Tensor], eps: float) -> NormConfig | None:
    """The norm that gives the same as `part`, for numbers so small that eps counts too, and for a narrow dtype."""
    generator = torch.Generator().manual_seed(0)
    size = parameters["weight"].shape[0]
    weights = {name: torch.randn(size, generator=generator) for name in parameters}
    for candidate in (replace(candidate, eps=eps) for candidate in CANDIDATES if candidate.bias == ("bias" in weights)):
        equal = True
        for scale, dtype in ((1.0, torch.float32), (eps**0.5, torch.float32), (1.0, torch.bfloat16)):
            x = (torch.randn(3, 5, size, generator=generator) * scale).to(dtype)
            given = {name: value.to(dtype) for name, value in weights.items()}
            theirs = torch.func.functional_call(part, given, (x,))
            ours = normalise(candidate, x, given["weight"], given.get("bias"), "norm")
            close = 2e-2 if dtype == torch.bfloat16 else 1e-5
            equal &= torch.allclose(theirs.float(), ours.float(), rtol=close, atol=close)
        if equal:
            return candidate
    return None


def _replace(part: Any, norm: NormConfig) -> None:
    part.forward = lambda x: normalise(norm, x, part.weight, getattr(part, "bias", None), "norm")
