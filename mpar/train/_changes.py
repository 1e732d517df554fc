"""What changed since a checkpoint was written: in the configuration, and in the function that the model computes."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints

from mpar.checkpoint import Json
from mpar.models import Trainable
from mpar.train._adapters import adapted
from mpar.train._config import AdapterConfig, ModelConfig, PlainConfig, TrainConfig
from mpar.train._quantised import quantised
from mpar.train._setup import model_of

__all__ = ["config_changes", "function_changes", "model_then"]

_NOT_SHOWN = ("plan", "resume", "run_dir", "progress", "tensorboard")  # they say nothing of how the run trains
_ONLY_NAME = ("hardware",)
_FREE = {
    *("logits_chunk", "chunk", "grouped", "padded"),  # how much is computed at a time
    *("initializer_range", "dt_range", "dt_floor", "out_scale"),  # fresh weights
    *("loss_weight", "aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss", "bias_rate"),  # what is learned, as a rate is
}
"""The fields of a decoder's config that do not change what it computes from its parameters."""
_LONGEST = 60
_ABSENT = "(not given)"


def config_changes(then: Mapping[str, Json], now: PlainConfig) -> list[str]:
    """A line `key: value then -> value now` for each key that differs; a key that is not given has its default."""
    before, after = _flat(TrainConfig, then), _flat(TrainConfig, now)
    names = [*after, *(name for name in before if name not in after)]
    return [
        f"{name}: {_shown(before.get(name, _ABSENT))} -> {_shown(after.get(name, _ABSENT))}"
        for name in names
        if before.get(name, _ABSENT) != after.get(name, _ABSENT)
    ]


def _flat(cls: type, plain: Mapping[str, Json]) -> dict[str, Json]:
    """The values of a group by dotted key, with the defaults of `cls`; also those of keys that `cls` does not have."""
    flat: dict[str, Json] = {}
    for field in fields(cls):
        if cls is TrainConfig and field.name in _NOT_SHOWN:
            continue
        hint, value = get_type_hints(cls)[field.name], plain.get(field.name, _default(field))
        if is_dataclass(hint) and isinstance(value, Mapping):
            group = _flat(hint, value) if field.name not in _ONLY_NAME else {"name": value.get("name")}  # type: ignore[arg-type]
            flat |= {f"{field.name}.{name}": item for name, item in group.items()}
        else:
            flat |= dict(_leaves(field.name, value))
    known = {field.name for field in fields(cls)}
    return flat | {name: item for key in plain if key not in known for name, item in _leaves(key, plain[key])}


def _default(field: Any) -> Json:
    if field.default is not MISSING:
        return list(field.default) if isinstance(field.default, tuple) else field.default
    return {} if field.default_factory is not MISSING else None


def _leaves(name: str, value: Json) -> Iterator[tuple[str, Json]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(f"{name}.{key}", item)
    else:
        yield name, value


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def model_then(config: Mapping[str, Json], hf_config: Mapping[str, Json] | None) -> Trainable | None:
    """The model of a checkpoint with its adapters: `config` is the configuration that it records, `hf_config` its config.json.

    None for a checkpoint of an older version that lacks what is needed. Raises an MparError if no model can be made of it.
    """
    group, adapter = config.get("model"), config.get("adapter")
    if not isinstance(group, Mapping):
        return None
    chosen = (
        {}
        if not isinstance(adapter, Mapping)
        else {field.name: _in_tuples(adapter[field.name]) for field in fields(AdapterConfig) if field.name in adapter}
    )
    made = _plain_model_then(group, hf_config)
    if made is None:
        return None
    known = {name: _in_tuples(group[name]) for name in ("quantise", "quantise_exclude") if name in group}
    return quantised(ModelConfig(name="", seq_len=1, **known), adapted(AdapterConfig(**chosen), made))


def _in_tuples(value: Json) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _plain_model_then(group: Mapping[str, Json], hf_config: Mapping[str, Json] | None) -> Trainable | None:
    known: dict[str, Any] = {field.name: group[field.name] for field in fields(ModelConfig) if field.name in group}
    raw = hf_config or known.get("config")
    known |= {name: tuple(known.get(name) or ()) for name in ("ignore", "quantise_exclude")}
    if known.get("plugin") is not None:
        return model_of(ModelConfig(**known))
    return model_of(ModelConfig(**known | {"config": dict(raw), "path": None})) if raw else None


def function_changes(then: Trainable, now: Trainable) -> list[str]:
    """A line for everything in which the functions of two models differ; equal changes of many layers are one line."""
    counts = [sum(segment.name.startswith("layers.") for segment in model.segments) for model in (then, now)]
    if counts[0] != counts[1]:
        return [f"number of layers: {counts[0]} -> {counts[1]}"]
    before, after = (dict(_settings("", model.settings)) for model in (then, now))
    layers_of_change: dict[str, list[int]] = {}
    for name in dict.fromkeys([*after, *before]):
        if before.get(name, _ABSENT) == after.get(name, _ABSENT):
            continue
        layer = re.match(r"layers\.(\d+)\.", name)
        short = name if layer is None else name[layer.end() :]
        line = f"{short}: {_shown(before.get(name, _ABSENT))} -> {_shown(after.get(name, _ABSENT))}"
        layers_of_change.setdefault(line, []).extend([] if layer is None else [int(layer[1])])
    return [line if not found else f"{line} (layers {_ranges(found)})" for line, found in layers_of_change.items()]


def _settings(name: str, value: object) -> Iterator[tuple[str, Json]]:
    """The values of a config by dotted name; the class of a part is its `kind`."""
    if is_dataclass(value) and not isinstance(value, type):
        yield f"{name}kind", type(value).__name__
        for field in fields(value):
            if field.name not in _FREE:
                yield from _settings(f"{name}{field.name}.", getattr(value, field.name))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _settings(f"{name}{key}.", item)
    elif isinstance(value, tuple) and any(isinstance(item, tuple) or is_dataclass(item) for item in value):
        for index, item in enumerate(value):
            named = isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)  # a rotation with its name
            yield from _settings(*((f"{name}{item[0]}.", item[1]) if named else (f"{name}{index}.", item)))
    else:
        yield name.removesuffix("."), list(value) if isinstance(value, tuple) else value  # type: ignore[misc]


def _ranges(numbers: list[int]) -> str:
    """`0-3, 5` for 0, 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
