"""Opens data files: local ones and those of other file systems, compressed or not."""

import bz2
import codecs
import contextlib
import gzip
import hashlib
import importlib
import io
import lzma
import os
from collections.abc import Iterator
from pathlib import PurePosixPath
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from mpar.errors import ConfigError
from mpar.files import Unreadable, open_regular

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["COMPRESSED", "file_digest", "file_format", "file_sample_digest", "is_remote", "open_data", "optional"]

_PIECES, _PIECE_BYTES = 16, 2**16
_CHUNK_BYTES = 2**10  # of zstd at a time, which become 32 MiB at most: a block of 4 bytes may stand for 128 KiB
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zstd")


def is_remote(name: str) -> bool:
    """Whether a name is an address such as `s3://bucket/rows.jsonl`, which fsspec opens."""
    return "://" in name


def file_format(name: str) -> str:
    """The suffix that says what a file holds, in lower case, without that of a compression: `.jsonl` for `rows.JSONL.gz`."""
    path = PurePosixPath(name.rpartition("://")[2])
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


@contextlib.contextmanager
def open_data(name: str) -> Iterator[BinaryIO]:
    """The content of a file, decompressed as it is read. Raises Unreadable, also while it is read."""
    raw = _remote(name) if is_remote(name) else open_regular(name)
    try:
        with raw, _decompressed(raw, name) as file:
            _refuse_wide_text(file)
            yield file
    except EOFError:
        raise Unreadable("its compressed content ends too early") from None
    except (OSError, lzma.LZMAError) as error:
        raise Unreadable(f"not readable: {getattr(error, 'strerror', None) or error}") from None
    except Exception as error:
        if type(error).__module__.startswith("zstandard"):
            raise Unreadable(f"not readable: {error}") from None
        raise


def file_digest(name: str) -> bytes:
    """A hash of the content of a file as it lies there; of one that cannot be read, of the reason."""
    try:
        with _remote(name) if is_remote(name) else open_regular(name) as file:
            return hashlib.file_digest(file, "sha256").digest()  # type: ignore[arg-type]  # fsspec's files have readinto
    except (OSError, Unreadable) as error:
        return str(error).encode("utf-8", "backslashreplace")


def file_sample_digest(name: str) -> bytes:
    """A hash of the size of a file and of sixteen pieces of its content, which together are all of a file up to a MiB; of a file
    that cannot be read, of the reason."""
    try:
        with _remote(name) if is_remote(name) else open_regular(name) as file:
            size_bytes = file.seek(0, os.SEEK_END)
            digest = hashlib.sha256(str(size_bytes).encode())
            stride = max(_PIECE_BYTES, (size_bytes - _PIECE_BYTES) // (_PIECES - 1))
            for piece in range(_PIECES):
                file.seek(piece * stride)
                digest.update(file.read(_PIECE_BYTES))
            return digest.digest()
    except (OSError, Unreadable) as error:
        return str(error).encode("utf-8", "backslashreplace")


def optional(module: str, purpose: str, package: str = "'mpar[data]'") -> ModuleType:
    """A module that is installed with `package`. Raises ConfigError if it is not there."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(
            f"cannot read {purpose}: it takes {module.partition('.')[0]}, which is not installed.\n"
            f"pip install {package}, or write the rows as .jsonl."
        ) from None


def _remote(name: str) -> BinaryIO:
    scheme = name.partition("://")[0]
    fsspec = optional("fsspec", f"files of {scheme}://")
    try:
        return cast(BinaryIO, fsspec.open(name, "rb").open())
    except ImportError as error:
        raise ConfigError(f"cannot read {name}: {error}.\nInstall what fsspec names, or copy the file here.") from None
    except ValueError as error:
        raise Unreadable(f"fsspec cannot open it: {error}") from None


def _decompressed(raw: BinaryIO, name: str) -> contextlib.AbstractContextManager[BinaryIO]:
    suffix = os.path.splitext(name)[1].lower()
    if suffix == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if suffix == ".bz2":
        return cast(BinaryIO, bz2.BZ2File(raw))
    if suffix == ".xz":
        return cast(BinaryIO, lzma.LZMAFile(raw))
    if suffix in (".zst", ".zstd"):
        zstandard = optional("zstandard", f"{name}")
        return cast(BinaryIO, io.BufferedReader(_Zstd(raw, zstandard.ZstdDecompressor(max_window_size=2**27))))
    return contextlib.nullcontext(raw)


class _Zstd(io.RawIOBase):
    """The content of zstd frames, one behind the other. The library's own reader takes a frame that is cut off for one that ends.

    Reading raises EOFError where a frame is cut off.
    """

    def __init__(self, raw: BinaryIO, decompressor: Any) -> None:
        self._raw, self._decompressor = raw, decompressor
        self._frame: Any = None
        self._made = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        while not self._made:
            unused = b"" if self._frame is None or not self._frame.eof else self._frame.unused_data
            if self._frame is not None and self._frame.eof:
                self._frame = None
            chunk = unused or self._raw.read(_CHUNK_BYTES)
            if not chunk:
                if self._frame is not None:
                    raise EOFError
                return 0
            if self._frame is None:
                self._frame = self._decompressor.decompressobj()
            self._made = memoryview(self._frame.decompress(chunk))
        into = memoryview(buffer).cast("B")
        count = min(len(self._made), len(into))
        into[:count] = self._made[:count]
        self._made = self._made[count:]
        return count


def _refuse_wide_text(file: BinaryIO) -> None:
    """Raise Unreadable for text in UTF-16 or UTF-32, every line of which would be one more row that is not UTF-8."""
    peek = getattr(file, "peek", None)
    if peek is not None and peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):  # UTF-32 begins like UTF-16
        raise Unreadable("it is text in UTF-16 or UTF-32; write it as UTF-8")
