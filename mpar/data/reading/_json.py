"""Rows in JSON: one object a line, or a list of objects."""

import io
import json
import re
from collections.abc import Iterator
from typing import BinaryIO

from mpar.data.reading._files import open_data
from mpar.data.reading._record import EXCERPT, MAX_ROW_BYTES, Mark, Record, excerpt_of
from mpar.files import ROW_DECODER, Unreadable, parse_json

__all__ = ["json_lines", "json_list"]

_SPACES = re.compile("[ \t\r\n]*")
_MIN_READ = 2**16  # characters
_END = -1  # an offset behind everything
_MAX_SKIPPED_BYTES = 2**26  # of one line


def json_lines(name: str, behind: Mark) -> Iterator[Record]:
    """A record for each line that is not blank, of the lines behind a mark. Behind a fault of the file itself there are none."""
    line, offset = behind.lines, behind.offset
    if offset == _END:
        return
    try:
        with open_data(name) as file:
            _skip(file, offset)
            while raw := file.readline(MAX_ROW_BYTES + 1):
                line += 1
                offset += len(raw)
                if len(raw) > MAX_ROW_BYTES:
                    offset += _skip_line(file, raw)
                    fault = Unreadable(f"the line has more than {MAX_ROW_BYTES // 2**20} MiB")
                    yield Record(name, line, fault, excerpt_of(raw), offset)
                elif raw.strip():
                    yield Record(name, line, _parse(raw), excerpt_of(raw), offset)
    except Unreadable as error:
        yield Record(name, line, error, offset=_END)


def json_list(name: str) -> Iterator[Record]:
    """A record for each item of a list, numbered from 1. Two of them at most are in memory."""
    number = 1
    try:
        with open_data(name) as file:
            text = _ListText(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""))
            if text.next_character() != "[":
                raise Unreadable("a .json file holds a list of rows; one row a line is .jsonl")
            mark = text.next_character(keep=True)
            while mark != "]":
                excerpt, value = text.next_value()
                yield Record(name, number, value, excerpt)
                number += 1
                mark = text.next_character()
                if mark not in (",", "]"):
                    raise Unreadable(f"not JSON: after a row comes {mark or 'nothing'}, and should come a comma or ]")
            if text.next_character(keep=True):
                raise Unreadable("not JSON: something follows the list of rows")
    except UnicodeDecodeError as error:
        yield Record(name, number, Unreadable(f"not UTF-8: {error.reason}"))
    except json.JSONDecodeError as error:
        yield Record(name, number, Unreadable(f"not JSON: {error.msg}"))
    except RecursionError:
        yield Record(name, number, Unreadable("not JSON that is read here: it is nested too deeply"))
    except ValueError as error:
        yield Record(name, number, error)


def _skip(file: BinaryIO, offset: int) -> None:
    """Go to a byte of a file that has just been opened. What can only be read from its beginning is read up to there."""
    if file.seekable():
        file.seek(offset)
        return
    while offset > 0 and (passed := len(file.read(min(offset, MAX_ROW_BYTES)))):
        offset -= passed


def _skip_line(file: BinaryIO, raw: bytes) -> int:
    """Read to the end of the line that begins with `raw`; returns the bytes read. Raises Unreadable if that is too far."""
    skipped = 0
    while raw and not raw.endswith(b"\n"):
        raw = file.readline(MAX_ROW_BYTES)
        skipped += len(raw)
        if skipped > _MAX_SKIPPED_BYTES:
            raise Unreadable(f"the line has more than {_MAX_SKIPPED_BYTES // 2**20} MiB, and nothing behind it was read")
    return skipped


def _parse(content: bytes) -> object:
    try:
        return parse_json(content, ROW_DECODER)
    except Unreadable as error:
        return error


class _ListText:
    """The text of a JSON list, of which two rows at most are in memory."""

    def __init__(self, file: io.TextIOWrapper) -> None:
        self._file, self._text, self._at = file, "", 0

    def next_character(self, keep: bool = False) -> str:
        """The next character that is no white space, which is passed unless it is to be kept; nothing at the end."""
        while True:
            self._at = _SPACES.match(self._text, self._at).end()  # type: ignore[union-attr]  # it matches nothing, too
            if self._at < len(self._text):
                self._at += not keep
                return self._text[self._at - (not keep)]
            if not self._fill():
                return ""

    def next_value(self) -> tuple[str, object]:
        """How the next value begins, and the value. Raises what ROW_DECODER raises, Unreadable if it is too long."""
        self.next_character(keep=True)
        while True:
            try:
                value, end = ROW_DECODER.raw_decode(self._text, self._at)
                problem = None
            except json.JSONDecodeError as error:  # perhaps because the text goes on
                value, end, problem = None, len(self._text), error
            if end + 4 > len(self._text) and self._fill():  # a number may go on after "1.5e-"
                continue
            if problem is not None:
                raise problem
            excerpt = self._text[self._at : self._at + EXCERPT]
            self._at = end
            return excerpt, value

    def _fill(self) -> bool:
        """Read as much again. Returns whether there was more. Raises Unreadable if the present value is too long."""
        pending = len(self._text) - self._at
        if pending > MAX_ROW_BYTES:
            raise Unreadable(f"a row has more than {MAX_ROW_BYTES // 2**20} million characters")
        more = self._file.read(max(_MIN_READ, pending))
        if more:
            self._text, self._at = self._text[self._at :] + more, 0
        return bool(more)
