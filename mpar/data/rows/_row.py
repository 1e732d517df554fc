"""Rows as training uses them, and why others cannot be used."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mpar.data._template import Message

__all__ = ["BadRow", "EmptyRow", "FilteredRow", "MediaRow", "Row", "RowFault"]


class RowFault(Exception):
    """Says why one row cannot be used. Whoever reads rows counts it and goes on."""


@dataclass(frozen=True)
class Row:
    """One usable row: a conversation (`messages`, `tools`) or plain `text`, with its file and line, and the format it had."""

    file: str
    line: int  # from 1; 0 if the row is the entire file
    format: str
    text: str = ""
    messages: tuple[Message, ...] = ()
    tools: tuple[object, ...] | None = None
    excerpt: str = ""  # how the row begins in its file
    rejected: tuple[Message, ...] = ()  # of a pair, the conversation with the answer that is not preferred
    columns: Mapping[str, object] = field(default_factory=dict)  # what a task may read besides

    @property
    def where(self) -> str:
        """`file:line`, or only the file if the row is all of it."""
        return f"{self.file}:{self.line}" if self.line else self.file

    @property
    def num_characters(self) -> int:
        """Characters of the text, or of the contents of the messages."""
        return len(self.text) + sum(len(str(message.get("content"))) for message in (*self.messages, *self.rejected))

    def malformed(self, reason: str) -> "BadRow":
        """This row as one that cannot be used after all."""
        return BadRow(self.file, self.line, reason, self.excerpt)


@dataclass(frozen=True)
class BadRow:
    """One row that cannot be used: its file and line as in `Row`, why, and its first characters."""

    file: str
    line: int
    reason: str
    text: str = ""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{where}: {self.reason}"


@dataclass(frozen=True)
class EmptyRow:
    """A text without a character. Folders of source code have many such files, so this is no fault."""


@dataclass(frozen=True)
class MediaRow:
    """A row with images, sound or video. Its text alone would teach to describe what is not there, so it is left out."""


@dataclass(frozen=True)
class FilteredRow:
    """A row that the user's own function left out."""
