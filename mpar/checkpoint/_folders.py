"""Finds and deletes the checkpoints in a folder. Only complete ones count: the name of a checkpoint proves nothing."""

import re
import shutil
import warnings
from pathlib import Path

from mpar.checkpoint._index import file_problems, read_index
from mpar.errors import CheckpointError

__all__ = ["available", "checkpoint_name", "latest", "prune"]

_NAME = re.compile(r"step_(\d{8,})")
_LEFTOVER = re.compile(r"\.step_\d{8,}\.(partial|deleted)")


def checkpoint_name(step: int) -> str:
    """The folder name of the checkpoint of `step`."""
    return f"step_{step:08d}"


def partial_name(step: int) -> str:
    """The folder name of the same checkpoint while it is being written."""
    return f".{checkpoint_name(step)}.partial"


def available(folder: str | Path) -> list[Path]:
    """The complete checkpoints in `folder`, lowest step first; none if there is no such folder.

    A checkpoint is complete if its index is sound and every file that it names has the right size. `verify` checks contents.
    """
    return [path for path in _named(Path(folder)) if _is_complete(path)]


def latest(folder: str | Path) -> Path | None:
    """The complete checkpoint of the highest step in `folder`, or None. Unfinished and truncated ones are skipped."""
    return next((path for path in reversed(_named(Path(folder))) if _is_complete(path)), None)


def prune(folder: Path, *, keep: int, new: Path) -> None:
    """Delete all complete checkpoints except those of the `keep` highest steps and `new`, and the remains of unfinished writes.

    A folder is renamed before its files are deleted, so that a half-deleted one is never taken for a checkpoint. If something
    cannot be deleted, that is only a warning: the new checkpoint exists, and training can go on.
    """
    try:
        for path in available(folder)[:-keep]:
            if path != new:
                path.rename(folder / f".{path.name}.deleted")
        for path in sorted(folder.iterdir()):
            if _LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path)
    except OSError as error:
        warnings.warn(f"cannot delete old checkpoints in {folder}: {error}", stacklevel=2)


def _named(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    matches = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)) and path.is_dir()]
    return [path for _, path in sorted(matches)]


def _is_complete(path: Path) -> bool:
    try:
        return not file_problems(path, read_index(path))
    except CheckpointError:
        return False
