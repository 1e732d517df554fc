"""From the names of sources to records: files of any format, local or remote, compressed or not, one record a row."""

import itertools
from collections.abc import Callable, Iterator, Mapping

from mpar.data.reading._arrow import arrow_rows
from mpar.data.reading._csv import csv_rows
from mpar.data.reading._files import file_digest, file_format, file_sample_digest, open_data
from mpar.data.reading._json import json_lines, json_list
from mpar.data.reading._record import Mark, Record
from mpar.data.reading._sources import SELF_COGNITION, Source, find_sources, is_indexed
from mpar.data.reading._text import text_file

__all__ = [
    "SELF_COGNITION",
    "Mark",
    "Record",
    "Source",
    "file_digest",
    "file_sample_digest",
    "find_sources",
    "is_indexed",
    "open_data",
    "read_records",
]

_BEGINNING = Mark()
_READERS: Mapping[str, Callable[[str], Iterator[Record]]] = {
    ".json": json_list,
    ".csv": csv_rows,
    ".tsv": csv_rows,
    ".parquet": arrow_rows,
    ".arrow": arrow_rows,
}


def read_records(name: str, behind: Mark = _BEGINNING) -> Iterator[Record]:
    """The records of a file behind a mark, in its order. What cannot be read is a record with the reason; nothing is raised for
    it. Lines of JSON go on at a byte; of other formats, the records before the mark are read once more.
    """
    if file_format(name) == ".jsonl":
        return json_lines(name, behind)
    return itertools.islice(_READERS.get(file_format(name), text_file)(name), behind.records, None)
