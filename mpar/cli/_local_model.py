"""Folders of Hugging Face, without torch: the local cache of the hub, config.json, and whether weights are complete."""

import re
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from mpar.errors import CheckpointError
from mpar.files import kind_of_file, read_json

__all__ = ["config_file", "local_folder", "weight_problems"]

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def local_folder(path: str) -> str:
    """`path`, or if it is the name of a model on the hub, its folder in the local cache of the hub, if that has it.

    Nothing is downloaded, and the network is not asked.
    """
    if Path(path).exists() or not _HUB_ID.fullmatch(path):
        return path
    try:
        return str(huggingface_hub.snapshot_download(path, local_files_only=True))
    except LocalEntryNotFoundError:
        return path


def config_file(path: str) -> Path:
    """The config.json of the folder `path`. Raises CheckpointError if there is none, with what to do about it."""
    file = Path(path) / "config.json"
    if file.is_file():
        return file
    if file.exists():
        raise CheckpointError(f"{file} is {kind_of_file(file.stat().st_mode)}, not a regular file")
    if not Path(path).exists() and _HUB_ID.fullmatch(path):
        raise CheckpointError(
            "it is no folder, and the local cache of the Hugging Face hub does not have it. mpar downloads nothing: "
            f"`hf download {path}` puts it into the cache, `hf download {path} --local-dir DIR` into a folder for model.path=DIR"
        )
    if not Path(path).is_dir():
        raise CheckpointError(f"there is no such {'folder: it is a file' if Path(path).exists() else 'folder'}")
    content = ", ".join(sorted(entry.name for entry in Path(path).iterdir())[:6]) or "nothing"
    raise CheckpointError(f"the folder has no config.json; it has {content}")


def weight_problems(folder: Path) -> Iterator[str]:
    """A line for each file of weights in `folder` that is missing, or is shorter than its header says."""
    if not (folder / "config.json").is_file():
        return
    try:
        files = _weight_files(folder)
    except (OSError, ValueError, AttributeError) as error:
        yield f"model.path={folder}: cannot read {_INDEX}: {error}"
        return
    for name in files:
        file = folder / name
        if not file.is_file():
            yield (
                f"model.path={folder}: {name} is missing; with model.random_init=true a run starts from fresh weights. "
                "Pickled weights (.bin, .pt) are not read: convert them to safetensors"
            )
            continue
        try:
            safe_open(file, framework="np")
        except (OSError, SafetensorError) as error:
            yield f"model.path={folder}: {name} of {file.stat().st_size:,} bytes is damaged or cut off ({error}); get it again"


def _weight_files(folder: Path) -> list[str]:
    if not (folder / _INDEX).is_file():
        return [_SINGLE]
    weight_map = read_json(folder / _INDEX).get("weight_map")
    return sorted({str(file) for file in weight_map.values()}) if isinstance(weight_map, dict) else []
