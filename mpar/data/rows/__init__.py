"""From records to rows: conversations of every known format, and plain text."""

from mpar.data.rows._conversation import COLUMNS
from mpar.data.rows._read import AnyRow, read_rows
from mpar.data.rows._row import BadRow, EmptyRow, MediaRow, Row

__all__ = ["COLUMNS", "AnyRow", "BadRow", "EmptyRow", "MediaRow", "Row", "read_rows"]
