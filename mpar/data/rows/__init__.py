"""From records to rows: conversations of every known format, and plain text."""

from mpar.data.rows._conversation import COLUMNS
from mpar.data.rows._message import conversation
from mpar.data.rows._preprocess import preprocess_plug_in
from mpar.data.rows._prompt import MESSAGES
from mpar.data.rows._read import AnyRow, Columns, read_rows, row_reader
from mpar.data.rows._row import BadRow, EmptyRow, FilteredRow, MediaRow, Row

__all__ = [
    "COLUMNS",
    "MESSAGES",
    "AnyRow",
    "BadRow",
    "Columns",
    "EmptyRow",
    "FilteredRow",
    "MediaRow",
    "Row",
    "conversation",
    "preprocess_plug_in",
    "read_rows",
    "row_reader",
]
