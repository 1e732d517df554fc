"""Defaults: what the generation_config.json of a model says about how its tokens are chosen, and what ends its answers."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mpar.errors import CheckpointError
from mpar.infer._sampling import Sampling, sampling_problems
from mpar.models import Model

__all__ = ["end_ids", "with_defaults"]

_OF_DRAWS = ("temperature", "top_k", "top_p", "min_p")
_OF_ALL = ("repetition_penalty",)


def with_defaults(model: Model, sampling: Sampling, given: Mapping[str, float | None]) -> tuple[Sampling, dict[str, float]]:
    """`sampling` with the values that are `given`, and in the place of each None that of generation_config.json, if it has one.

    Returns it with the values that are the file's. As in transformers, those that only matter for draws count if `do_sample` is
    true. Raises CheckpointError if the file has values with which nothing can be sampled.
    """
    settings = _settings(model)
    names = (*_OF_ALL, *(_OF_DRAWS if settings.get("do_sample") and given.get("temperature") != 0 else ()))
    stated: dict[str, Any] = {}
    for name in names:
        value = settings.get(name, 1.0 if name == "temperature" else None)  # transformers draws at 1 unless told otherwise
        if given.get(name) is None and value is not None:
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise _unusable(model, f"{name} is {value!r}")
            stated[name] = value
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    problems = sampling_problems(stated)
    if problems:
        raise _unusable(model, "; ".join(f"{name}={stated[name]!r} {problem}" for name, problem in problems.items()))
    return replace(sampling, **(stated | chosen)), stated


def end_ids(model: Model) -> tuple[int, ...]:
    """The tokens that end an answer, by generation_config.json."""
    value = _settings(model).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and token >= 0 for token in ids):
        raise _unusable(model, f"eos_token_id is {value!r}")
    return tuple(ids)


def _settings(model: Model) -> Mapping[str, object]:
    settings = json.loads(model.hf_generation_json or "{}")
    return settings if isinstance(settings, dict) else {}


def _unusable(model: Model, problem: str) -> CheckpointError:
    return CheckpointError(
        f"cannot use the generation_config.json of this {model.name}: {problem}.\nCorrect the file, or remove the key from it."
    )
