"""`state.json`: what a checkpoint holds besides tensors. It has only JSON values, so that reading it never runs code."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from mpar.checkpoint._digest import digest
from mpar.checkpoint._files import parse_json, read_bounded
from mpar.checkpoint._index import Index
from mpar.checkpoint._open import read_index
from mpar.checkpoint._version1 import parse_state_1
from mpar.errors import CheckpointError

__all__ = ["STATE_NAME", "Json", "json_problems", "read_extras", "read_state", "state_text"]

STATE_NAME = "state.json"
_LARGEST_STATE = 2**26
"""Of state.json in bytes: it holds a configuration and a few numbers."""

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
"""A JSON value."""


def read_extras(path: str | Path) -> dict[str, Json]:
    """The extras that the checkpoint at `path` was saved with. Raises CheckpointError if they are missing or damaged, or are not
    those that the index of the checkpoint binds.
    """
    return read_state(Path(path), read_index(Path(path)))


def read_state(folder: Path, index: Index) -> dict[str, Json]:
    """The extras of the checkpoint with this index. Raises CheckpointError if they are missing, damaged, or of another
    checkpoint.
    """
    file = folder / STATE_NAME
    content = read_bounded(file, _LARGEST_STATE)
    if index.version == 1:
        return parse_state_1(file, index, content)
    if len(content) != index.state_bytes or digest(content).hex() != index.state_checksum:
        raise CheckpointError(f"{file}: does not fit the checksum in the index; it is damaged, or of another checkpoint.")
    extras = parse_json(file, content)
    if not isinstance(extras, dict) or extras.get("step") != index.step:
        raise CheckpointError(
            f"{file}: is not the state of step {index.step}, of which the index is; it is of another checkpoint."
        )
    return extras


def state_text(step: int, extras: Mapping[str, Json]) -> str:
    """The content of `state.json`. Raises CheckpointError if it is longer than what is read back."""
    text = json.dumps({"step": step, **extras}, indent=1) + "\n"
    if len(text) > _LARGEST_STATE:
        raise CheckpointError(f"the extras of step {step} take {len(text)} bytes of JSON; at most {_LARGEST_STATE} are read back")
    return text


def json_problems(value: object, where: str = "extras") -> list[str]:
    """A line for everything in `value` that JSON would refuse or change (tuples become lists, which is allowed)."""
    if isinstance(value, Mapping):
        problems = [f"{where}: key {key!r} is not a string" for key in value if not isinstance(key, str)]
        return problems + [line for key, item in value.items() for line in json_problems(item, f"{where}.{key}")]
    if isinstance(value, (list, tuple)):
        return [line for i, item in enumerate(value) for line in json_problems(item, f"{where}.{i}")]
    if isinstance(value, float) and not math.isfinite(value):
        return [f"{where}: {value} is not a JSON number; use None"]
    if value is None or isinstance(value, (str, int, float, bool)):
        return []
    return [f"{where}: a {type(value).__name__} is not a JSON value; tensors belong in `tensors`"]
