"""Rows of .csv and .tsv files, whose first line names the columns. Every cell is a text."""

import csv
import io
from collections.abc import Iterator

from mpar.data.reading._files import file_format, open_data
from mpar.data.reading._record import EXCERPT, MAX_ROW_BYTES, Record
from mpar.files import Unreadable

__all__ = ["csv_rows"]


def csv_rows(name: str) -> Iterator[Record]:
    """A record for each row behind the header, with the number of the line on which it ends."""
    line = 0
    csv.field_size_limit(MAX_ROW_BYTES)
    try:
        with open_data(name) as file:
            text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
            rows = csv.reader(text, delimiter="\t" if file_format(name) == ".tsv" else ",", strict=True)
            header = next(rows, [])
            line = rows.line_num
            twice = sorted({column for column in header if header.count(column) > 1})
            if twice or not header:
                raise Unreadable(f"its first line names {twice} twice" if header else "it has no line that names columns")
            for cells in rows:
                line = rows.line_num
                if cells:
                    yield Record(name, line, _columns(header, cells), ",".join(cells)[:EXCERPT])
    except UnicodeDecodeError as error:
        yield Record(name, line + 1, Unreadable(f"not UTF-8: {error.reason}"))
    except csv.Error as error:
        yield Record(name, line + 1, Unreadable(f"not CSV: {error}"))
    except Unreadable as error:
        yield Record(name, line, error)


def _columns(header: list[str], cells: list[str]) -> object:
    if len(cells) != len(header):
        return Unreadable(f"it has {len(cells)} cells, and the first line names {len(header)} columns")
    return dict(zip(header, cells, strict=True))
