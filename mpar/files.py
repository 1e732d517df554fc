"""Input files that a stranger may have made: opened only if they are regular files, read up to a bound, and parsed strictly."""

import json
import os
import stat
from io import BufferedReader

__all__ = [
    "MAX_JSON_BYTES",
    "MAX_TABLE_BYTES",
    "ROW_DECODER",
    "Unreadable",
    "kind_of_file",
    "open_regular",
    "parse_json",
    "read_bytes",
    "read_json",
    "read_text",
]

MAX_JSON_BYTES = 2**24
"""Bytes of a JSON file that is read as one value; parsed, it may take thirty times as many. The index of the largest model that
is published has 12 million."""
MAX_TABLE_BYTES = 2**23
"""Bytes of a table of actions of a pipeline."""

_MAX_DIGITS = 300  # every such integer can be a float; transformers writes 1e30 for "no limit" with all its digits
_KINDS = {
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a named pipe",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}


class Unreadable(ValueError):
    """Why a file, or a value in it, cannot be used. The message does not name the file: whoever asked for the file adds that."""


def kind_of_file(mode: int) -> str:
    """What a file of this `st_mode` is, in words."""
    return next((words for check, words in _KINDS.items() if check(mode)), "a regular file")


def open_regular(path: str | os.PathLike[str], flags: int = 0, folder: int | None = None) -> BufferedReader:
    """Open a regular file for reading. Pipes, devices, sockets and folders are refused without waiting for them.

    flags: more flags of os.open, such as O_NOFOLLOW. folder: the open folder in which `path` is looked up.
    Raises Unreadable.
    """
    try:
        _check_regular(os.stat(path, dir_fd=folder).st_mode)  # before opening, which is an event for some devices
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags, dir_fd=folder)
    except OSError as error:
        raise Unreadable(error.strerror or str(error)) from None
    except ValueError as error:  # a zero byte in the path
        raise Unreadable(str(error)) from None
    try:
        _check_regular(os.fstat(descriptor).st_mode)
    except Unreadable:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def _check_regular(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise Unreadable(f"it is {kind_of_file(mode)}, not a regular file")


def read_bytes(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """The content of a regular file of at most `max_bytes` bytes. Raises Unreadable."""
    with open_regular(path) as file:
        try:
            content = b"" if os.fstat(file.fileno()).st_size > max_bytes else file.read(max_bytes + 1)
            size_bytes = max(len(content), os.fstat(file.fileno()).st_size)
        except OSError as error:
            raise Unreadable(error.strerror or str(error)) from None
    if size_bytes > max_bytes:
        raise Unreadable(f"it has {size_bytes:,} bytes, and at most {max_bytes:,} are read")
    return content


def read_text(path: str | os.PathLike[str], max_bytes: int) -> str:
    """The UTF-8 text in a regular file of at most `max_bytes` bytes. Raises Unreadable."""
    try:
        return read_bytes(path, max_bytes).decode()
    except UnicodeDecodeError as error:
        raise Unreadable(f"not UTF-8: {error.reason} at byte {error.start}") from None


def read_json(path: str | os.PathLike[str], max_bytes: int = MAX_JSON_BYTES) -> dict[str, object]:
    """The object in a JSON file of at most `max_bytes`. It may have NaN and Infinity, which transformers writes into configs.

    Raises Unreadable.
    """
    value = parse_json(read_bytes(path, max_bytes), _FILE_DECODER)
    if not isinstance(value, dict):
        raise Unreadable(f"it holds a {type(value).__name__}, not an object")
    return value


def parse_json(content: bytes, decoder: json.JSONDecoder) -> object:
    """The value in UTF-8 text, which may begin with a byte-order mark. Raises Unreadable."""
    try:
        return decoder.decode(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise Unreadable(f"not UTF-8: {error.reason} at byte {error.start}") from None
    except Unreadable:
        raise
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"not JSON: {error}") from None


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise Unreadable(f"the key {twice[:60]!r} occurs twice in one object")
    return value


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise Unreadable(f"an integer has {len(digits):,} digits, and at most {_MAX_DIGITS} are read")
    return int(digits)


def _float(digits: str) -> float:
    value = float(digits)
    if abs(value) == float("inf"):
        raise Unreadable(f"{digits[:60]} is larger than any float")
    return value


def _constant(name: str) -> float:
    raise Unreadable(f"not JSON: {name}")


_FILE_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_int=_integer)
ROW_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_int=_integer, parse_float=_float, parse_constant=_constant)
"""For rows of data, which no NaN may be in. Raises ValueError (Unreadable is one), also for keys that occur twice and integers of
hundreds of digits; or RecursionError."""
