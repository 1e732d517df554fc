"""The cache of tokenised data: entries with checksums, of all that documents depend on, which only their owner can write.

An entry is a folder with the bytes of each array and `entry.json`, which says of what data they are and has the checksum of the
arrays; its own checksum is in its first line. Nothing in it can run code, and no link is followed.
"""

import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpar.data._documents import Documents, LoadReport
from mpar.data.rows import BadRow
from mpar.errors import DataError
from mpar.files import Unreadable, open_regular

__all__ = ["Entry", "cached", "entry_folder", "load_entry", "save_entry"]

_DTYPES = {"tokens": "<i4", "trained": "|b1", "starts": "<i8", "lengths": "<i8", "rows": "<i8", "sources": "<i4"}
_DESCRIPTION = "entry.json"
_OWNER_ONLY = stat.S_IRUSR | stat.S_IWUSR
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True)
class Entry:
    """Documents, what became of their rows, and for a part of a stream the cursor of the part behind it, as JSON."""

    documents: Documents
    report: LoadReport
    following: Mapping[str, object] | None = None


def cached(folder: Path, key: str, make: Callable[[], Entry]) -> Entry:
    """The entry in `folder`, made and saved if it is not there. Of several processes that want it, one makes it, and the others
    wait. An entry that is damaged is made anew, and its report says so.

    Raises what `load_entry`, `make` and `save_entry` raise.
    """
    found = load_entry(folder, key)
    if isinstance(found, Entry):
        return found
    with _locked(folder):
        found = load_entry(folder, key)  # another process may have made it meanwhile
        if isinstance(found, Entry):
            return found
        made = make()
        save_entry(folder, key, made, replaced=bool(found))
    return replace(made, report=replace(made.report, notice=found))


def entry_folder(cache_dir: Path, key: str) -> Path:
    """The folder of an entry. Every user has entries of their own, so that those of others are in nobody's way."""
    return cache_dir / f"{key[:32]}-{os.geteuid()}"


def load_entry(folder: Path, key: str) -> Entry | str:
    """What `save_entry` wrote for `key`, with memory-mapped documents; else why not, as a line for the user, which is empty if
    there is no entry.

    All bytes are compared with their checksum. Raises DataError if the folder belongs to somebody else, or is a link or a file.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise _refused(folder, f"it is no folder that can be opened ({error.strerror})") from None
    try:
        owner = os.fstat(descriptor).st_uid
        if owner != os.geteuid():
            raise _refused(folder, f"it belongs to user {owner}, and you are user {os.geteuid()}")
        _check_owner(descriptor, "the folder")
        entry = _read(descriptor, key)
    except DataError:
        raise
    except (OSError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:  # Unreadable is a ValueError
        return f"the cached data in {folder} were not used, but made anew: {error if str(error) else type(error).__name__}"
    finally:
        os.close(descriptor)
    return replace(entry, report=replace(entry.report, cached=True))


def save_entry(folder: Path, key: str, entry: Entry, *, replaced: bool) -> None:
    """Write an entry, which appears only when it is complete. With `replaced`, the one that is there is deleted.

    Raises DataError if the folder cannot be written.
    """
    draft, documents = None, entry.documents
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=folder.parent))  # which nobody else can open
        for name, dtype in _dtypes(documents.trained.dtype != np.bool_).items():
            np.ascontiguousarray(getattr(documents, name), dtype=dtype).tofile(draft / name)
            os.chmod(draft / name, _OWNER_ONLY)
        content = {
            "key": key,
            "sizes": {name: len(getattr(documents, name)) for name in _DTYPES},
            "weighed": documents.trained.dtype != np.bool_,
            "checksum": _checksum(documents),
            "names": documents.names,
            "source_names": documents.source_names,
            "pairs": documents.pairs,
            "columns": {str(row): columns for row, columns in documents.columns.items()},
            "report": asdict(entry.report),
            "following": entry.following,
        }
        text = json.dumps(content, default=str).encode()
        (draft / _DESCRIPTION).write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
        os.chmod(draft / _DESCRIPTION, _OWNER_ONLY)
        if replaced:
            shutil.rmtree(folder)
        try:
            os.rename(draft, folder)
        except OSError:
            if not folder.is_dir():  # else another process has written the same entry meanwhile
                raise
    except OSError as error:
        raise _unwritable(folder, error) from None
    finally:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of an entry. The kernel frees it when the process ends, whatever ends it; a file system without locks has
    none. The file of the lock is deleted behind it.
    """
    name = folder.with_name(f".{folder.name}.lock")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(name)
    except OSError as error:
        raise _unwritable(folder, error) from None
    try:
        yield
    finally:
        name.unlink(missing_ok=True)
        os.close(lock)


def _lock(name: Path) -> int:
    """The descriptor that holds the lock of a file, which is made if it is not there."""
    while True:
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, _OWNER_ONLY)
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(name), os.fstat(descriptor)):
                return descriptor
        os.close(descriptor)  # who held the lock has deleted its file


def _read(folder: int, key: str) -> Entry:
    """Raises Unreadable, OSError, KeyError, TypeError or ValueError if something is not as `save_entry` wrote it."""
    with open_regular(_DESCRIPTION, os.O_NOFOLLOW, folder) as file:
        _check_owner(file.fileno(), _DESCRIPTION)
        checksum, text = file.readline(80), file.read()
    if hashlib.sha256(text).hexdigest().encode() + b"\n" != checksum:
        raise Unreadable(f"{_DESCRIPTION} does not have the checksum that was written with it")
    content = json.loads(text)
    if content["key"] != key:
        raise Unreadable("they are of other data or settings")
    dtypes = _dtypes(content["weighed"])
    arrays = {name: _map(folder, name, dtype, content["sizes"][name]) for name, dtype in dtypes.items()}
    names, source_names = tuple(content["names"]), tuple(content["source_names"])
    columns = {int(row): columns for row, columns in content["columns"].items()}
    more: dict[str, Any] = {"columns": columns, "pairs": content["pairs"]}
    documents = Documents(**arrays, names=names, source_names=source_names, **more)  # type: ignore[arg-type]
    if _checksum(documents) != content["checksum"]:
        raise Unreadable("their bytes do not have the checksum that was written with them")
    malformed = tuple(BadRow(**row) for row in content["report"].pop("malformed"))
    return Entry(documents, LoadReport(**content["report"], malformed=malformed), content["following"])


def _checksum(documents: Documents) -> str:
    """A hash of all arrays of an entry."""
    return hashlib.sha256(documents.fingerprint.encode() + np.ascontiguousarray(documents.sources).tobytes()).hexdigest()


def _check_owner(descriptor: int, name: str) -> None:
    """Raise Unreadable if others than this user could have written an open file."""
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid() or found.st_mode & _WRITABLE_BY_OTHERS:
        raise Unreadable(f"others than you could have written {name}")


def _dtypes(weighed: bool) -> Mapping[str, str]:
    """The dtype of each array; `trained` has numbers if tokens weigh more or less than 1."""
    return {**_DTYPES, "trained": "<f4"} if weighed else _DTYPES


def _map(folder: int, name: str, kind: str, size: int) -> NDArray[np.generic]:
    dtype = np.dtype(kind)
    with open_regular(name, os.O_NOFOLLOW, folder) as file:
        _check_owner(file.fileno(), name)
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes != size * dtype.itemsize:
            raise Unreadable(f"{name} has {size_bytes:,} bytes and should have {size * dtype.itemsize:,}")
        if not size_bytes:  # which cannot be mapped
            return np.zeros(0, dtype)
        return np.memmap(file, dtype=dtype, mode="r", shape=(size,))


def _refused(folder: Path, problem: str) -> DataError:
    return DataError(
        f"cannot use the cached data in {folder}: {problem}.\n"
        "Delete it, or choose another data.cache_dir, which others cannot write into."
    )


def _unwritable(folder: Path, error: OSError) -> DataError:
    problem = f"cannot write tokenised data into {folder.parent}: {error.strerror}"
    return DataError(f"{problem}. Choose another data.cache_dir.")
