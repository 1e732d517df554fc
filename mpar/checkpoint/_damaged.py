"""What to do about a checkpoint that cannot be read: nothing is passed over in silence, and nothing is deleted."""

from pathlib import Path

from mpar.checkpoint._folders import named, problems_of
from mpar.checkpoint._index import NewerVersionError
from mpar.checkpoint._load import all_damage
from mpar.checkpoint._open import read_index
from mpar.errors import CheckpointError

__all__ = ["latest", "move_aside", "move_damaged_aside"]

_WAYS_OUT = (
    "Start the same command with checkpoint.on_damaged=move_aside, which reads all of it, renames it to {name}.damaged if it is "
    "damaged, and goes on from {before} (in Python: checkpoint.move_damaged_aside)"
)


def latest(folder: str | Path) -> Path | None:
    """The checkpoint of the highest step in `folder`, or None if there is none. What an unfinished save has left does not count.

    Raises CheckpointError if that checkpoint cannot be read: its index, its state, or a file's presence, size or header is wrong.
    The error names it, what is wrong, the newest one that can be read, and the ways out. Blocks are compared when they are read,
    by `load` and `verify`.
    """
    paths = named(Path(folder))
    for path in paths[-1:]:
        _refuse_newer(path)
    problems = problems_of(paths[-1]) if paths else []
    if not problems:
        return paths[-1] if paths else None
    before = _newest_sound(paths[:-1])
    name = "none of the others can be read" if before is None else f"the newest one that can be read is {before.name}"
    raise CheckpointError(
        f"cannot go on from the newest checkpoint, {paths[-1]}:\n  " + "\n  ".join(problems) + f"\nIn {folder} {name}.\n"
        f"{_WAYS_OUT.format(name=paths[-1].name, before='the one before' if before else 'the beginning')}; or give the folder of "
        "another checkpoint as resume=, and a new run_dir."
    )


def move_aside(path: str | Path) -> Path:
    """Rename a checkpoint so that it is none any more: `step_X.damaged`, or with a number behind if there is one. Returns the new
    path. Raises CheckpointError if the system refuses.
    """
    path = Path(path)
    number = 0
    while (target := path.with_name(f"{path.name}.damaged{f'-{number}' if number else ''}")).exists():
        number += 1
    try:
        return path.rename(target)
    except OSError as error:
        raise CheckpointError(f"cannot move {path} aside to {target} ({error.strerror})") from error


def move_damaged_aside(folder: str | Path) -> list[str]:
    """Move the newest checkpoints in `folder` aside until one is sound, of which all bytes are read and compared.

    Returns a line for each that was moved: where it is now, and what is wrong with it. Raises CheckpointError if one cannot be
    moved.
    """
    moved = []
    for path in reversed(named(Path(folder))):
        damage = all_damage(path)
        if not damage:
            break
        if path.exists():  # on several nodes each may be doing this
            more = f" (and {len(damage) - 1} more)" if len(damage) > 1 else ""
            moved.append(f"{path} is damaged and was renamed to {move_aside(path).name}: {damage[0]}{more}")
    return moved


def _newest_sound(paths: list[Path]) -> Path | None:
    return next((path for path in reversed(paths) if not problems_of(path)), None)


def _refuse_newer(path: Path) -> None:
    """Raise NewerVersionError if a newer mpar wrote the checkpoint: it is not damaged, and nothing to move aside."""
    try:
        read_index(path)
    except NewerVersionError:
        raise
    except CheckpointError:
        return
