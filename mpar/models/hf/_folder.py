"""A folder of Hugging Face: which file holds which tensor, and its JSON files."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from mpar.errors import CheckpointError

__all__ = ["INDEX", "SINGLE", "locate", "read_json", "write_json"]

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def locate(folder: Path) -> dict[str, str]:
    """Name of each tensor to the file that holds it."""
    if (folder / INDEX).is_file():
        where = read_json(folder / INDEX).get("weight_map")
        if not isinstance(where, dict) or any(not isinstance(f, str) or Path(f).name != f for f in where.values()):
            raise CheckpointError(f"cannot read {folder / INDEX}: weight_map must map names to files in the same folder")
        gone = sorted({file for file in where.values() if not (folder / file).is_file()})
        if gone:
            raise CheckpointError(f"cannot read {folder}: the index names files that are not there: {', '.join(gone)}")
        return dict(where)
    if not (folder / SINGLE).is_file():
        there = ", ".join(sorted(file.name for file in folder.iterdir())[:8]) if folder.is_dir() else "nothing: it is no folder"
        raise CheckpointError(
            f"cannot read weights from {folder}: no {SINGLE} and no {INDEX}; it has {there}.\n"
            "Pickled weights (.bin, .pt) are not read; convert them to safetensors first."
        )
    try:
        with safe_open(folder / SINGLE, framework="pt") as file:
            return dict.fromkeys(file.keys(), SINGLE)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {folder / SINGLE}: {error}") from error


def read_json(file: Path) -> dict[str, object]:
    """The object in a JSON file. Raises CheckpointError if there is none."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"cannot read {file}: it holds a {type(value).__name__}, not an object")
    return value


def write_json(file: Path, value: Mapping[str, object]) -> None:
    """Write an object into a JSON file."""
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
