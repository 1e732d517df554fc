"""Rows of Parquet and Arrow files, such as the `datasets` library writes."""

import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from mpar.data.reading._files import file_format, open_data, optional
from mpar.data.reading._record import EXCERPT, Record
from mpar.files import Unreadable

__all__ = ["arrow_rows"]

_ROWS_AT_ONCE = 256
_PART_BYTES = 2**24


def arrow_rows(name: str) -> Iterator[Record]:
    """A record for each row, numbered from 1. Fields that are null are left out, because Arrow gives them to every struct."""
    pyarrow = optional("pyarrow", name)
    number = 0
    try:
        with open_data(name) as content:
            file = pyarrow.PythonFile(_Bounded(content), mode="r")
            for batch in _batches(pyarrow, name, file):
                for value in batch.to_pylist():
                    number += 1
                    row = _without_nulls(value)
                    yield Record(name, number, row, json.dumps(row, ensure_ascii=False, default=str)[:EXCERPT])
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).strip().partition("\n")[0][:200]
        yield Record(name, number + 1, Unreadable(f"not readable as {file_format(name).removeprefix('.')}: {reason}"))
    except Unreadable as error:
        yield Record(name, number, error)


class _Bounded:
    """A file that never makes room for more bytes than it has. A damaged one may say that a message has billions of them."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek, self.tell, self.close = file.seek, file.tell, file.close
        self.closed = False

    def seekable(self) -> bool:
        return self._file.seekable()

    def read(self, size: int = -1) -> bytes:
        """At most so many bytes, read in parts."""
        if size < _PART_BYTES:
            return self._file.read(size)
        parts = []
        while size > 0 and (part := self._file.read(min(size, _PART_BYTES))):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def _batches(pyarrow: Any, name: str, file: Any) -> Iterator[Any]:
    if file_format(name) == ".parquet":
        yield from optional("pyarrow.parquet", name).ParquetFile(file).iter_batches(batch_size=_ROWS_AT_ONCE)
        return
    try:
        reader = pyarrow.ipc.open_file(file)
    except pyarrow.ArrowInvalid:  # the stream format, which `datasets` writes
        file.seek(0)
        yield from pyarrow.ipc.open_stream(file)
        return
    for i in range(reader.num_record_batches):
        yield reader.get_batch(i)


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
