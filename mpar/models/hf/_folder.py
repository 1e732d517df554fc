"""A folder of Hugging Face: which file holds which tensor, and its JSON files."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from mpar.errors import CheckpointError

__all__ = ["INDEX", "SINGLE", "locate", "read_json", "write_json"]

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def locate(folder: Path) -> dict[str, str]:
    """For each tensor name the file that holds the tensor. Raises CheckpointError if the folder has no weights to read."""
    if (folder / INDEX).is_file():
        file_of_tensor = read_json(folder / INDEX).get("weight_map")
        if not isinstance(file_of_tensor, dict) or any(
            not isinstance(f, str) or Path(f).name != f for f in file_of_tensor.values()
        ):
            raise CheckpointError(f"cannot read {folder / INDEX}: weight_map must map names to files in the same folder")
        missing = sorted({file for file in file_of_tensor.values() if not (folder / file).is_file()})
        if missing:
            raise CheckpointError(f"cannot read {folder}: the index names files that are not there: {', '.join(missing)}")
        return dict(file_of_tensor)
    if not (folder / SINGLE).is_file():
        content = ", ".join(sorted(file.name for file in folder.iterdir())[:8]) if folder.is_dir() else "nothing: it is no folder"
        raise CheckpointError(
            f"cannot read weights from {folder}: no {SINGLE} and no {INDEX}; it has {content}.\n"
            "Pickled weights (.bin, .pt) are not read; convert them to safetensors first."
        )
    try:
        with safe_open(folder / SINGLE, framework="pt") as file:
            return dict.fromkeys(file.keys(), SINGLE)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {folder / SINGLE}: {error}") from error


def read_json(file: Path) -> dict[str, object]:
    """The object in a JSON file. Raises CheckpointError if the file cannot be read or holds something else."""
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
