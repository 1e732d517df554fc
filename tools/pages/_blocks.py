"""The blocks of a page, and the folders and files that they name."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from sybil import Document, Region
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer

__all__ = ["Block", "Kind", "PageError", "read_blocks"]

INFO = re.compile(r'(?P<language>[\w+-]*)(?:[ \t]+title="(?P<title>[^"]+)")?[ \t]*$\n', re.MULTILINE)


class PageError(Exception):
    """A block is of no known kind, or fails, or what it shows is not true."""


class Kind(StrEnum):
    """What is done with a block."""

    PYTHON = "python"
    FILE = "file"
    OUTPUT = "output"
    CONSOLE = "console"
    SHELL = "sh"
    PICTURE = "mermaid"


@dataclass(frozen=True)
class Block:
    """A fenced block. line: the number of its fence's line, from 1. start, end: where `text` is in the page, in characters."""

    kind: Kind
    text: str
    line: int
    start: int
    end: int
    title: str = ""


def read_blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order. Raises PageError for a block that is of none of the kinds of `Kind`."""
    document = Document.parse(str(page), _fences)
    return list(_blocks(document, [region for _, region in sorted(document.regions, key=lambda item: item[0])]))


def _fences(document: Document) -> Iterable[Region]:
    yield from RawFencedCodeBlockLexer(INFO)(document)


def _blocks(document: Document, regions: list[Region]) -> Iterator[Block]:
    shown_by = -1  # where the Python block ends whose output the next block may show
    for region in regions:
        source, language, title = (region.lexemes[name] for name in ("source", "language", "title"))
        line = document.text.count("\n", 0, region.start) + 1
        follows = shown_by >= 0 and not document.text[shown_by : region.start].strip()
        kind = _kind(language, title, follows)
        if kind is None:
            hint = "text must follow a python block" if language == "text" else f"there are {', '.join(Kind)}"
            raise PageError(f"{document.path}:{line}: nothing can be done with a block of {language or 'no language'}: {hint}")
        start = region.start + source.offset
        yield Block(kind, str(source), line, start, start + len(source), title or "")
        shown_by = region.end if kind is Kind.PYTHON else -1


def _kind(language: str, title: str | None, follows_python: bool) -> Kind | None:
    if title:
        return Kind.FILE
    if language == "text":
        return Kind.OUTPUT if follows_python else None
    return Kind(language) if language in (Kind.PYTHON, Kind.CONSOLE, Kind.SHELL, Kind.PICTURE) else None
