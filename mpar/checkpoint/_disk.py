"""How a save changes the disk: files, names, and when both are durable. Every change is one call of `os`, so that tests can make
each of them fail."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["confirm_names", "make_folder", "remove_folder", "sync", "write_file", "write_text"]


def make_folder(path: Path) -> None:
    """Make `path` and the folders above it that are missing. Their names are durable when this returns."""
    if path.is_dir():
        return
    make_folder(path.parent)
    try:
        os.mkdir(path)
    except FileExistsError:  # another rank was faster
        if not path.is_dir():
            raise
    sync(path.parent)


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a new file, whose bytes are durable when this returns; its name is so after `sync` of its folder."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        for part in parts:
            view = memoryview(part).cast("B")
            while view:
                view = view[os.write(descriptor, view) :]  # less than all may have been written
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a file that others may be waiting for: under its name it is complete."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    write_file(unfinished, [text.encode()])
    os.rename(unfinished, path)


def sync(path: Path) -> None:
    """Wait until the content of the file, or the names in the folder, `path` are durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def confirm_names(path: Path) -> None:
    """Wait until the name of the folder `path`, and those of the folders above it, are durable: whoever made them may not have
    waited. Folders further up that refuse, because they are another user's or cannot be written, are passed over.
    """
    parent, *others = path.absolute().parents
    sync(parent)
    for above in others:
        with contextlib.suppress(OSError):
            sync(above)


def remove_folder(path: Path) -> None:
    """Remove a folder with all that is in it, or a file. What is gone already is no error: other ranks may remove it, too."""
    try:
        with os.scandir(path) as entries:
            inside = list(entries)
        for entry in inside:
            if entry.is_dir(follow_symlinks=False):
                remove_folder(Path(entry.path))
            else:
                os.unlink(entry.path)
        os.rmdir(path)
    except NotADirectoryError:
        path.unlink(missing_ok=True)
    except FileNotFoundError:
        return
