"""Opens the files of a checkpoint. What stands there may be anything: a link, a pipe, a device, or a file of any size and
content.
"""

import errno
import json
import os
import stat
from pathlib import Path
from types import TracebackType
from typing import Self

from mpar.errors import CheckpointError

__all__ = ["OpenFile", "count_of", "fill", "is_name", "open_regular", "parse_json", "read_bounded"]

_LARGEST_COUNT = 2**63 - 1


def open_regular(file: Path) -> int:
    """A descriptor of `file` for reading; it never waits. Raises CheckpointError unless it is a regular file, and no link to
    one.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY)
    except FileNotFoundError:
        raise CheckpointError(f"{file}: is missing") from None
    except OSError as error:
        what = {errno.ELOOP: "is a symbolic link", errno.ENXIO: "is a socket"}.get(error.errno or 0, "cannot be opened")
        raise CheckpointError(f"{file}: {what} ({error.strerror}), and not a regular file that can be read") from error
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise CheckpointError(f"{file}: is not a regular file, which every file of a checkpoint is")


class OpenFile:
    """A regular file, open for reading until `close`, or as a context. Raises CheckpointError as `open_regular` does."""

    def __init__(self, file: Path) -> None:
        self._file, self._descriptor = file, open_regular(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; nothing can be read from it any more."""
        os.close(self._descriptor)


def read_bounded(file: Path, largest: int) -> bytes:
    """The content of `file`. Raises CheckpointError if it is not regular, cannot be read, or has more than `largest` bytes."""
    descriptor = open_regular(file)
    try:
        size = os.fstat(descriptor).st_size
        if size > largest:
            raise CheckpointError(f"{file}: has {size} bytes, which is more than the {largest} that it may have")
        content = bytearray(size)
        fill(descriptor, file, memoryview(content), 0)
        return bytes(content)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error
    finally:
        os.close(descriptor)


def fill(descriptor: int, file: Path, view: memoryview, begin: int) -> None:
    """Read from byte `begin` on until `view` is full. Raises CheckpointError if the file ends before."""
    while view:
        count = os.preadv(descriptor, [view], begin)
        if count == 0:
            raise CheckpointError(f"{file}: ends at byte {begin} while being read")
        view, begin = view[count:], begin + count


def parse_json(file: Path, content: bytes) -> object:
    """The JSON value in `content`, which was read from `file`. Raises CheckpointError if it is none, or nested too deep."""
    try:
        return json.loads(content)
    except RecursionError:
        raise CheckpointError(f"{file}: its JSON is nested deeper than anything that a checkpoint holds; it is damaged") from None
    except ValueError as error:
        raise CheckpointError(f"{file}: is not JSON ({error}); it is damaged") from error


def count_of(value: object) -> int:
    """`value` if it is an int from 0 to 2**63 - 1, and neither bool nor float. Raises ValueError otherwise."""
    if type(value) is int and 0 <= value <= _LARGEST_COUNT:
        return value
    raise ValueError(f"{str(value)[:40]} is not a count")


def is_name(value: object) -> bool:
    """Whether `value` can name a tensor in a file: printable text, not empty, and none of the names that begin with __."""
    return isinstance(value, str) and bool(value) and value.isprintable() and not value.startswith("__")
