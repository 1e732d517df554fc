"""A record: one row as it stands in its file."""

from dataclasses import dataclass

__all__ = ["EXCERPT", "MAX_ROW_BYTES", "Mark", "Record", "excerpt_of"]

EXCERPT = 200  # characters of a row that are shown if it is malformed
MAX_ROW_BYTES = 2**23  # of a line, or characters of a row in a list; tokenised, a row takes a hundred times as many


@dataclass(frozen=True)
class Mark:
    """How far a file has been read: records, lines, and the byte at which the next line begins, which only lines of JSON tell."""

    records: int = 0
    lines: int = 0
    offset: int = 0


@dataclass(frozen=True)
class Record:
    """One row of a file.

    file, line: where it stands, lines counted from 1; 0 if the row is the entire file.
    value:      its columns; a text if the row is the entire file; or a ValueError, why it has none.
    excerpt:    how it begins.
    offset:     the byte behind it in its file, decompressed, if its format tells.
    """

    file: str
    line: int
    value: object
    excerpt: str = ""
    offset: int = 0


def excerpt_of(raw: bytes) -> str:
    """How a row begins, as text."""
    return raw[: 4 * EXCERPT].decode("utf-8-sig", "replace")[:EXCERPT].rstrip("\r\n")
