"""A record: one row as it stands in its file."""

from dataclasses import dataclass

__all__ = ["EXCERPT", "MAX_ROW_BYTES", "Record", "excerpt_of"]

EXCERPT = 200  # characters of a row that are shown if it is malformed
MAX_ROW_BYTES = 2**23  # of a line, or characters of a row in a list; tokenised, a row takes a hundred times as many


@dataclass(frozen=True)
class Record:
    """One row of a file.

    file, line: where it stands, lines counted from 1; 0 if the row is the entire file.
    value:      its columns; a text if the row is the entire file; or a ValueError, why it has none.
    excerpt:    how it begins.
    """

    file: str
    line: int
    value: object
    excerpt: str = ""


def excerpt_of(raw: bytes) -> str:
    """How a row begins, as text."""
    return raw[: 4 * EXCERPT].decode("utf-8-sig", "replace")[:EXCERPT].rstrip("\r\n")
