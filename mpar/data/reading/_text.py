"""Plain text: a file is one row."""

from collections.abc import Iterator

from mpar.data.reading._files import open_data
from mpar.data.reading._record import EXCERPT, Record, excerpt_of
from mpar.files import Unreadable

__all__ = ["text_file"]

_MAX_TEXT_BYTES = 2**28


def text_file(name: str) -> Iterator[Record]:
    """One record, the text of the file. Line ends stay as they are; a byte-order mark is removed."""
    content = b""
    try:
        with open_data(name) as file:
            content = file.read(_MAX_TEXT_BYTES + 1)
        if len(content) > _MAX_TEXT_BYTES:
            raise Unreadable(f"it has more than {_MAX_TEXT_BYTES:,} bytes, and is one row")
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        yield Record(name, 0, Unreadable(f"not UTF-8: {error.reason} at byte {error.start}"), excerpt_of(content))
    except Unreadable as error:
        yield Record(name, 0, error)
    else:
        yield Record(name, 0, text, text[:EXCERPT])
