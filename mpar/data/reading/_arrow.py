"""Rows of Parquet and Arrow files, such as the `datasets` library writes."""

import json
from collections.abc import Iterator
from typing import Any

from mpar.data.reading._files import file_format, open_data, optional
from mpar.data.reading._record import EXCERPT, Record
from mpar.files import Unreadable

__all__ = ["arrow_rows"]

_ROWS_AT_ONCE = 256


def arrow_rows(name: str) -> Iterator[Record]:
    """A record for each row, numbered from 1. Fields that are null are left out, because Arrow gives them to every struct."""
    pyarrow = optional("pyarrow", name)
    number = 0
    try:
        with open_data(name) as file:
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
