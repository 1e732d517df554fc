"""What `--help` prints about the configuration of a command: its groups with their choices, then every key."""

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_type_hints

from mpar.cli._choices import choices
from mpar.cli._compose import compose_plain
from mpar.schedules import SCHEDULES
from mpar.train import PlainValue, bounds_of
from mpar.typed_values import describe

__all__ = ["describe_config"]


def describe_config(name: str, cls: type, overrides: Sequence[str], user_dir: Path | None = None) -> str:
    """Every group with its choices, also those in `user_dir`, then every key with its value and meaning."""
    lines = []
    known = choices(user_dir) if name == "train" else choices(user_dir).of(cls)
    if known.shown:
        lines.append("groups (group=choice):")
        for group in known.shown:
            lines += textwrap.wrap(known.line(group), 110, initial_indent=f"  {group:11} ", subsequent_indent=" " * 14)
        lines.append("")
    if name == "train":
        lines += ["schedules of a pipeline (schedule=NAME):"]
        lines += [f"  {name:12} {schedule.line}" for name, schedule in SCHEDULES.items() if known.has("schedule", name)]
        lines += [f"  {'auto':12} the best order that a search finds for the costs of the model on `hardware`", ""]
    lines.append("keys (key=value), each with its current value:")
    return "\n".join([*lines, *_key_lines(cls, compose_plain(name, cls, overrides, user_dir), "")])


def _key_lines(cls: type, values: PlainValue, prefix: str) -> list[str]:
    hints, lines = get_type_hints(cls), []
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        value = values[field.name] if isinstance(values, Mapping) and field.name in values else _default(field)
        if dataclasses.is_dataclass(hint):
            lines += _key_lines(hint, value, f"{prefix}{field.name}.")  # type: ignore[arg-type]
            continue
        shown = "null" if value is None else str(value)
        shown = shown if len(shown) <= 40 else f"{shown[:37]}..."
        kind = ", ".join(words for words in (describe(hint), bounds_of(field)) if words)
        lines.append(f"  {f'{prefix}{field.name}={shown}':48} {field.metadata.get('doc', '')} ({kind})")
    return lines


def _default(field: "dataclasses.Field[object]") -> object:
    """What a key is without a value: null for a group that has no default of its own, which is described key by key."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default
