"""Composition by Hydra, and what Hydra leaves open: unknown keys and choices are refused with the nearest valid name."""

import dataclasses
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mpar.cli._bind import _describe, bind, known_keys, nearest, open_keys
from mpar.conf_dir import conf_dir
from mpar.errors import ConfigError, UnknownNameError
from mpar.schedules import SCHEDULES

__all__ = ["bind_composed", "check_overrides", "choices", "compose_config", "conf_dir", "describe_config"]

T = TypeVar("T")
_HYDRA = "hydra"


def choices() -> dict[str, list[str]]:
    """Every group with its choices, sorted."""
    groups = sorted(path for path in conf_dir().iterdir() if path.is_dir() and not path.name.startswith((".", "_")))
    return {group.name: sorted(file.stem for file in group.glob("*.yaml")) for group in groups}


def compose_config(name: str, cls: type[T], overrides: Sequence[str]) -> tuple[T, dict[str, Any]]:
    """`conf/<name>.yaml` with `overrides` applied: as `cls`, and as the plain data that a run saves. Raises ConfigError."""
    checked = check_overrides(name, cls, overrides)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3", job_name="mpar"):
            composed = compose(name, overrides=checked)
        return bind_composed(cls, composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"cannot compose the configuration from {list(overrides)}:\n{error}") from error


def bind_composed(cls: type[T], composed: DictConfig) -> tuple[T, dict[str, Any]]:
    """What Hydra composed, as `cls` and as plain data."""
    plain = OmegaConf.to_container(composed, resolve=True, throw_on_missing=False)
    assert isinstance(plain, dict)
    values = {str(key): value for key, value in plain.items() if key != _HYDRA}
    return bind(cls, values), values


def check_overrides(name: str, cls: type, overrides: Sequence[str]) -> list[str]:
    """The overrides in the form for Hydra that may also set keys which no file mentions.

    Raises UnknownNameError listing every override whose key or choice does not exist, each with the nearest that does.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise ConfigError(f"cannot read the arguments: each must be group=choice or key=value.\n{error}") from error
    groups = choices() if name == "train" else {}
    keys, below = known_keys(cls), open_keys(cls)
    problems = [line for override in parsed for line in _problems(override, groups, keys, below)]
    if problems:
        raise UnknownNameError("unknown arguments:\n  " + "\n  ".join(problems))
    return [_forced(override, groups) for override in parsed]


def _forced(override: Override, groups: dict[str, list[str]]) -> str:
    """`++key=value` for `key=value`: Hydra refuses a key that has its default in the dataclass alone."""
    line = str(override.input_line)
    plain = override.type == OverrideType.CHANGE and override.key_or_group not in groups
    return f"++{line}" if plain and not override.key_or_group.startswith(_HYDRA) else line


def _problems(override: Override, groups: dict[str, list[str]], keys: list[str], below: list[str]) -> Iterable[str]:
    key, said = override.key_or_group, override.input_line
    if key.split(".")[0].split("/")[0] == _HYDRA:
        return
    if key in groups:
        value = override.value()
        names = value.list if isinstance(value, ChoiceSweep) else [value]
        for choice in names:
            if isinstance(choice, str) and choice not in groups[key]:
                near = nearest(choice, groups[key])
                yield f"{said}: there is no {key} {choice!r}; did you mean {key}={near}? ({', '.join(groups[key])})"
    elif key not in keys and not any(key.startswith(f"{open_key}.") for open_key in below):
        near = nearest(key, keys)
        yield f"{said}: there is no key {key!r}; did you mean {near}?"


def describe_config(name: str, cls: type, overrides: Sequence[str]) -> str:
    """What `--help` prints: groups with their choices, then every key with its value and meaning."""
    lines = []
    if name == "train":
        lines.append("groups (group=choice):")
        for group, names in choices().items():
            lines += textwrap.wrap(" ".join(names), 110, initial_indent=f"  {group:11} ", subsequent_indent=" " * 14)
        lines += ["", "schedules of a pipeline (schedule=NAME):"]
        lines += [f"  {name:12} {schedule.line}" for name, schedule in SCHEDULES.items() if name in choices()["schedule"]]
        lines += [f"  {'auto':12} found for the costs of the model on `hardware`, by search", ""]
    checked = check_overrides(name, cls, overrides)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf_dir()), version_base="1.3", job_name="mpar"):
        composed = compose(name, overrides=checked)
    plain = OmegaConf.to_container(composed, resolve=True, throw_on_missing=False)
    lines.append("keys (key=value), with the value that they have now:")
    lines += _key_lines(cls, plain, "")
    return "\n".join(lines)


def _key_lines(cls: type, values: Any, prefix: str) -> list[str]:
    hints, lines = get_type_hints(cls), []
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        value = values.get(field.name, field.default) if isinstance(values, dict) else field.default
        if dataclasses.is_dataclass(hint):
            lines += _key_lines(hint, value, f"{prefix}{field.name}.")  # type: ignore[arg-type]
            continue
        shown = "null" if value is None else str(value)
        shown = shown if len(shown) <= 40 else f"{shown[:37]}..."
        lines.append(f"  {f'{prefix}{field.name}={shown}':48} {field.metadata.get('doc', '')} ({_describe(hint)})")
    return lines
