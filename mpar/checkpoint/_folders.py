"""Finds and deletes the checkpoints in a folder. Only complete ones count: the name of a checkpoint proves nothing."""

import os
import re
from pathlib import Path

from mpar.checkpoint._disk import remove_folder, sync
from mpar.checkpoint._keep import LOSS, Keep
from mpar.checkpoint._open import file_problems, read_index
from mpar.checkpoint._state import read_extras, read_state
from mpar.errors import CheckpointError

__all__ = ["available", "checkpoint_name", "named", "problems_of", "prune", "remains"]

_NAME = re.compile(r"step_(\d{8,})")
_SAVE = re.compile(r"\.step_\d{8,}\.(?P<run>[\w-]+)-(?P<number>\d+)\.(partial|failed)")
_OTHERS = re.compile(r"\.step_\d{8,}\.(partial|deleted)|\.run_\w+")


def checkpoint_name(step: int) -> str:
    """The folder name of the checkpoint of `step`."""
    return f"step_{step:08d}"


def available(folder: str | Path) -> list[Path]:
    """The complete checkpoints in `folder`, lowest step first; none if there is no such folder.

    A checkpoint is complete if its index and state are sound, and every file has the right size and header. `verify` compares
    all.
    """
    return [path for path in named(Path(folder)) if not problems_of(path)]


def prune(folder: Path, keep: Keep, new: Path) -> None:
    """Delete the complete checkpoints that `keep` does not keep. `new` stays, and unless it is complete nothing is deleted.

    A folder is renamed before its files are deleted, so that a half-deleted one is never taken for a checkpoint. Raises OSError.
    """
    complete = available(folder)
    if new not in complete:
        return
    extras = {path: read_extras(path) for path in complete} if keep.best is not None else {}
    losses = {path: loss for path, entries in extras.items() if isinstance(loss := entries.get(LOSS), (int, float))}
    kept = {new, *keep.choose({path: int(path.name.removeprefix("step_")) for path in complete}, losses)}
    deleted = []
    for path in complete:
        if path not in kept:
            deleted.append(path.rename(folder / f".{path.name}.deleted"))
    if deleted:
        sync(folder)
    for path in deleted:
        remove_folder(path)


def remains(folder: Path, run: str, number: int) -> list[Path]:
    """What earlier saves and runs left behind in `folder`: half-deleted checkpoints, marks of runs, and partial checkpoints of
    other runs or of saves of this `run` before its save `number`.
    """
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        save = _SAVE.fullmatch(path.name)
        is_over = save is not None and (save["run"] != run or int(save["number"]) < number)
        if is_over or _OTHERS.fullmatch(path.name):
            found.append(path)
    return found


def named(folder: Path) -> list[Path]:
    """The folders in `folder` that have the name of a checkpoint, lowest step first, sound or not. Raises CheckpointError."""
    try:
        paths = [Path(entry.path) for entry in os.scandir(folder) if _NAME.fullmatch(entry.name) and entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"cannot look for checkpoints in {folder} ({error.strerror})") from error
    return sorted(paths, key=lambda path: int(path.name.removeprefix("step_")))


def problems_of(path: Path) -> list[str]:
    """What is wrong with the checkpoint at `path`, as far as index, state, and the sizes and headers of all files tell; else
    nothing.
    """
    try:
        index = read_index(path)
        read_state(path, index)
    except CheckpointError as error:
        return [str(error)]
    return file_problems(path, index, index.by_rank)
