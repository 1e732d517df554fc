"""The folder through which the processes of a machine share the blocks of a stream: made once, read by all, deleted behind them.

It holds entries of the cache, one a block; a file for each reader, which says where it stands; and the lock of the one process
that makes blocks.
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mpar.data._cursor import Cursor

__all__ = ["BlockFolder"]

_WANT = "want-"


class BlockFolder:
    """`path` with the blocks of the stream that `key` names."""

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.key = path, key

    def key_of(self, cursor: Cursor) -> str:
        """What names the block that begins at a cursor."""
        facts = [self.key, {**cursor.to_json(), "digest": ""}]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def entry_of(self, cursor: Cursor) -> Path:
        """The folder of the entry of that block."""
        return self.path / f"{cursor.block:012d}-{self.key_of(cursor)[:32]}"

    def want(self, reader: str, cursor: Cursor) -> None:
        """Say that the reader of this name, which is of this process, stands at a cursor."""
        descriptor, draft = tempfile.mkstemp(prefix=".draft-", dir=self.path)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            json.dump(cursor.to_json(), file)
        os.replace(draft, self.path / f"{_WANT}{os.getpid()}-{reader}")

    def stop_wanting(self, reader: str) -> None:
        """Say that the reader of this name reads no more."""
        (self.path / f"{_WANT}{os.getpid()}-{reader}").unlink(missing_ok=True)

    def wanted(self) -> list[Cursor]:
        """Where all readers stand whose processes live, the hindmost first."""
        found = []
        for file in self.path.glob(f"{_WANT}*"):
            with suppress(FileNotFoundError):
                if _lives(int(file.name.split("-")[1])):
                    found.append(Cursor.from_json(json.loads(file.read_bytes())))
                else:
                    file.unlink()
        return sorted(found, key=lambda cursor: cursor.block)

    def delete_outside(self, first: int, last: int) -> None:
        """Delete blocks before `first` and behind `last`. Who has opened one can go on reading it."""
        for entry in self.path.glob("[0-9]*-*"):
            if not first <= int(entry.name.partition("-")[0]) <= last:
                shutil.rmtree(entry, ignore_errors=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Be the one process that makes blocks. The lock is free again when the process ends, however it ends; what it had not
        finished is deleted by the next one."""
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with suppress(OSError):  # a file system without locks: several processes make the same blocks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            for draft in self.path.glob(".draft-*/"):
                shutil.rmtree(draft, ignore_errors=True)
            yield
        finally:
            os.close(descriptor)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
