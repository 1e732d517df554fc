"""A folder of Hugging Face: which file holds which tensor, and its JSON files."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mpar import files
from mpar.errors import CheckpointError

__all__ = ["DTYPES", "INDEX", "SINGLE", "locate", "open_weights", "read_json", "write_json"]

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The dtypes that weights may have, by their code in the format of safetensors."""
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_MAX_HEADER_BYTES = 2**24  # of the names, shapes and places of the tensors in one file


def locate(folder: Path) -> dict[str, str]:
    """For each tensor name the file that holds the tensor. Raises CheckpointError if the folder has no weights to read."""
    if os.path.exists(folder / INDEX):
        file_of_tensor = read_json(folder / INDEX).get("weight_map")
        if not isinstance(file_of_tensor, dict) or any(
            not isinstance(f, str) or Path(f).name != f for f in file_of_tensor.values()
        ):
            raise CheckpointError(f"cannot read {folder / INDEX}: weight_map must map names to files in the same folder")
        missing = sorted({file for file in file_of_tensor.values() if not os.path.exists(folder / file)})
        if missing:
            named = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
            raise CheckpointError(f"cannot read {folder / INDEX}: it names files that are not there: {named}")
        return dict(file_of_tensor)
    if not os.path.exists(folder / SINGLE):
        content = ", ".join(sorted(file.name for file in folder.iterdir())[:8]) if folder.is_dir() else "nothing: it is no folder"
        raise CheckpointError(
            f"cannot read weights from {folder}: no {SINGLE} and no {INDEX}; it has {content}.\n"
            "Pickled weights (.bin, .pt) are not read; convert them to safetensors first."
        )
    return dict.fromkeys(open_weights(folder / SINGLE).keys(), SINGLE)


def open_weights(file: Path) -> Any:
    """A safetensors file, mapped into memory and opened for reading. Raises CheckpointError unless it is a regular file with a
    header of at most 16 MiB."""
    try:
        with files.open_regular(file) as opened:
            size_bytes = int.from_bytes(opened.read(8), "little")
        if size_bytes > _MAX_HEADER_BYTES:
            raise files.Unreadable(f"its header would have {size_bytes:,} bytes, and at most {_MAX_HEADER_BYTES:,} are read")
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError, files.Unreadable) as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error


def read_json(file: Path, max_bytes: int = files.MAX_JSON_BYTES) -> dict[str, object]:
    """The object in a JSON file of at most `max_bytes`. Raises CheckpointError if it cannot be read or holds something else."""
    try:
        return files.read_json(file, max_bytes)
    except files.Unreadable as error:
        raise CheckpointError(f"cannot read {file}: {error}") from None


def write_json(file: Path, value: Mapping[str, object]) -> None:
    """Write an object into a JSON file."""
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
