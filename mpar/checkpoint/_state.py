"""`state.json`: what a checkpoint holds besides tensors. It has only JSON values, so that reading it never runs code."""

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from mpar.errors import CheckpointError

__all__ = ["STATE_NAME", "Json", "json_problems", "read_extras", "write_state"]

STATE_NAME = "state.json"

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
"""A JSON value."""


def read_extras(path: str | Path) -> dict[str, Json]:
    """The extras that the checkpoint at `path` was saved with. Raises CheckpointError if they are missing or damaged."""
    file = Path(path) / STATE_NAME
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        if raw["crc32"] != _crc32(raw["extras"]):
            raise CheckpointError(f"{file}: does not fit its own checksum; it is damaged. Use another checkpoint.")
        return raw["extras"]
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror}). Is this the folder of one checkpoint?") from error
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file}: is not the state of a checkpoint ({error!r}); it is damaged.") from error


def write_state(folder: Path, step: int, extras: Mapping[str, Json]) -> None:
    """Write `state.json` into `folder`."""
    body = {"step": step, **extras}
    (folder / STATE_NAME).write_text(json.dumps({"crc32": _crc32(body), "extras": body}, indent=1), encoding="utf-8")


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


def _crc32(body: Json) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
