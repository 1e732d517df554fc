"""Files of plain data that are kept from run to run, in a folder that only this user can have written into.

Several processes may use a folder at the same time: an entry appears only when it is complete. The entries that were not used for
longest are deleted, beyond a number and a size.
"""

import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["KeptFiles", "NotUsableError", "is_private", "reason"]

_DRAFT_S = 3600.0  # a draft this old was left by a process that was killed
_KEY_DIGITS = 64


class NotUsableError(Exception):
    """Why an entry does not count."""


def is_private(status: os.stat_result) -> bool:
    """Whether a file or folder belongs to this user, and nobody else may write it."""
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def reason(error: Exception) -> str:
    """Why an entry could not be read or written, in a few words."""
    return error.strerror or type(error).__name__ if isinstance(error, OSError) else str(error)


@dataclass(frozen=True)
class KeptFiles:
    """The entries in `folder` whose names are a key of 64 hexadecimal digits and `suffix`."""

    folder: Path
    suffix: str
    max_entries: int
    max_bytes: int

    def path(self, key: str) -> Path:
        """The file of an entry."""
        return self.folder / f"{key}{self.suffix}"

    def read(self, key: str) -> bytes:
        """The content of an entry. Raises FileNotFoundError; NotUsableError if another user may have written it; or OSError."""
        with self._opened() as folder:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with os.fdopen(os.open(self.path(key).name, flags, dir_fd=folder), "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise NotUsableError("it is no file")
                if not is_private(status):
                    raise NotUsableError("another user may have written it")
                if status.st_size > self.max_bytes:
                    raise NotUsableError(f"it has {status.st_size} bytes")
                content = file.read()
                os.utime(file.fileno())  # the entries that were used last are kept
        return content

    def write(self, key: str, content: bytes) -> None:
        """Keep `content`, and delete the entries that are too many. Raises NotUsableError or OSError."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self.folder.mkdir(mode=0o700)
        with self._opened() as folder:
            draft = f".draft-{secrets.token_hex(8)}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                with os.fdopen(os.open(draft, flags, 0o600, dir_fd=folder), "wb") as file:
                    file.write(content)
                os.replace(draft, self.path(key).name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                with suppress(OSError):
                    os.unlink(draft, dir_fd=folder)
                raise
            self._delete_oldest(folder)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """A descriptor of the folder: what is opened through it lies in the folder that was checked. Raises NotUsableError."""
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if not is_private(os.fstat(folder)):
                raise NotUsableError(f"others than you may write into {self.folder}")
            yield folder
        finally:
            os.close(folder)

    def _delete_oldest(self, folder: int) -> None:
        """Delete the entries that were not used for longest, and forgotten drafts."""
        entries, total = [], 0
        for name in os.listdir(folder):
            with suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if name.endswith(self.suffix) and len(name) == _KEY_DIGITS + len(self.suffix):
                    entries.append((status.st_mtime, name, status.st_size))
                elif name.startswith(".draft-") and time.time() - status.st_mtime > _DRAFT_S:
                    os.unlink(name, dir_fd=folder)
        for number, (_, name, size) in enumerate(sorted(entries, reverse=True)):
            total += size
            if number >= self.max_entries or total > self.max_bytes:
                with suppress(FileNotFoundError, IsADirectoryError):
                    os.unlink(name, dir_fd=folder)
