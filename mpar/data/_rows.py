"""Reads rows of training data: finds the files of a source, recognises the formats of rows, and says which cannot be used."""

import glob
import io
import json
import os
import re
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from mpar.data._template import Message
from mpar.errors import DataError, brief
from mpar.files import ROW_DECODER, Unreadable, kind_of_file, open_regular, parse_json, read_bytes

__all__ = ["BadRow", "EmptyRow", "Row", "Source", "find_sources", "read_rows"]

PYTHON_STDLIB = "python-stdlib"
SELF_COGNITION = "self-cognition"

_ROLES = ("system", "developer", "user", "assistant", "tool")
_SPACES = re.compile("[ \t\r\n]*")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}  # all other roles have the same name in both formats
_EXCERPT = 200  # characters of a row that is malformed
_MAX_ROW_BYTES = 2**23  # of a line, or characters of a row in a list; tokenised, a row takes a hundred times as many
_MIN_READ = 2**16  # characters
_MAX_SKIPPED_BYTES = 2**26  # of one line
_MAX_TEXT_BYTES = 2**28  # of a file that is one row
_SKIPPED_FOLDERS = {"__pycache__", "idle_test", "site-packages", "test", "tests"}  # of the standard library


class RowFault(Exception):
    """Says why one row cannot be used. The loader counts the row and goes on."""


@dataclass(frozen=True)
class Source:
    """Files to read in this order, and how many of their usable rows to take (None: all)."""

    name: str
    files: tuple[Path, ...]
    limit: int | None


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

    @property
    def where(self) -> str:
        """`file:line`, or only the file if the row is all of it."""
        return f"{self.file}:{self.line}" if self.line else self.file

    @property
    def num_characters(self) -> int:
        """Characters of the text, or of the contents of the messages."""
        return len(self.text) + sum(len(str(message.get("content"))) for message in self.messages)

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


def find_sources(kind: str, names: tuple[str, ...]) -> tuple[Source, ...]:
    """The files that each name means: a path, a glob, `self-cognition` or `python-stdlib`; `NAME#N` asks for N rows.

    Files of a glob come in sorted order. Raises DataError naming every source that has no file or does not fit `kind`.
    """
    sources, faults = [], []
    for name in names:
        match = None if os.path.exists(name) else re.fullmatch(r"(.+)#(\d+)", name)
        pattern, limit = (match[1], int(match[2])) if match else (name, None)
        try:
            sources.append(Source(name, _find_files(kind, pattern), limit))
        except RowFault as fault:
            faults.append(f"{name!r}: {fault}")
    if faults or not names:
        known = f"{SELF_COGNITION} (kind sft), {PYTHON_STDLIB} (kind pt)"
        raise DataError(
            f"cannot find the data: {'; '.join(faults) or 'no source is named'}.\n"
            f"A source is a file, a glob such as 'texts/**/*.md', or one of {known}; add #N for N rows of it."
        )
    return tuple(sources)


def _find_files(kind: str, pattern: str) -> tuple[Path, ...]:
    if pattern == SELF_COGNITION:
        if kind != "sft":
            raise RowFault(f"it holds conversations, kind is {kind}")
        return (Path(str(resources.files("mpar.data").joinpath("self_cognition.jsonl"))),)
    if pattern == PYTHON_STDLIB:
        if kind != "pt":
            raise RowFault(f"it holds plain text, kind is {kind}")
        root = Path(sysconfig.get_path("stdlib"))
        modules = sorted(p for p in root.rglob("*.py") if _SKIPPED_FOLDERS.isdisjoint(p.relative_to(root).parts))
        if not modules:
            raise RowFault(f"no source file under {root}")
        return tuple(modules)
    if "\0" in pattern:
        raise RowFault("no path has a zero byte")
    if os.path.isdir(pattern):
        raise RowFault(f"it is a folder; write '{pattern.rstrip('/')}/**/*.{'jsonl' if kind == 'sft' else 'txt'}'")
    names = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
    files = tuple(Path(name) for name in names if os.path.isfile(name))
    if not files:
        raise RowFault("no such file" if not names else f"{names[0]} is {kind_of_file(os.stat(names[0]).st_mode)}, not a file")
    if kind == "sft":
        wrong = [str(path) for path in files if path.suffix not in (".jsonl", ".json")]
        if wrong:
            raise RowFault(f"kind sft reads .jsonl and .json, not {', '.join(wrong[:3])}")
    return files


def read_rows(kind: str, source: Source) -> Iterator[Row | BadRow | EmptyRow]:
    """The rows of a source in the order of its files; with a limit, a fixed choice of that many usable rows.

    If the limit is above the number of usable rows, rows are repeated: all equally often, give or take one. The choice depends
    only on these two numbers.
    """
    rows = (row for path in source.files for row in _read_file(kind, path))
    if source.limit is None:
        yield from rows
        return
    usable: list[Row] = []
    for row in rows:
        if isinstance(row, Row):
            usable.append(row)
        else:
            yield row
    if usable:
        repeats, remainder = divmod(source.limit, len(usable))
        draws = np.random.PCG64(np.random.SeedSequence([source.limit, len(usable)])).random_raw(len(usable))
        chosen = np.sort(np.argsort(draws, kind="stable")[:remainder])
        for _ in range(repeats):
            yield from usable
        for i in chosen:
            yield usable[i]


def _read_file(kind: str, path: Path) -> Iterator[Row | BadRow | EmptyRow]:
    if path.suffix not in (".jsonl", ".json"):
        yield _text_file(path)
        return
    file = str(path)
    for line, excerpt, value in _json_lines(path) if path.suffix == ".jsonl" else _json_list(path):
        try:
            if isinstance(value, ValueError):
                raise RowFault(str(value))
            if not isinstance(value, dict):
                raise RowFault(f"it is a JSON {type(value).__name__}, not an object")
            if kind == "pt":
                text = _plain_text(value)
                yield Row(file, line, "text", text=text, excerpt=excerpt) if text else EmptyRow()
            else:
                yield _conversation(file, line, excerpt, value)
        except RowFault as fault:
            yield BadRow(file, line, str(fault), excerpt)


def _text_file(path: Path) -> Row | BadRow | EmptyRow:
    """An entire file as one row. Line ends stay as they are; a byte-order mark is removed."""
    content = b""
    try:
        content = read_bytes(path, _MAX_TEXT_BYTES)
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return BadRow(str(path), 0, f"not UTF-8: {error.reason} at byte {error.start}", _excerpt(content))
    except Unreadable as error:
        return BadRow(str(path), 0, f"not readable: {error}")
    return Row(str(path), 0, "file", text=text, excerpt=text[:_EXCERPT]) if text else EmptyRow()


def _json_lines(path: Path) -> Iterator[tuple[int, str, object]]:
    """The number of each line that is not blank, how it begins, and its value, or as a ValueError why it has none."""
    line = 0
    try:
        with open_regular(path) as file:
            while raw := file.readline(_MAX_ROW_BYTES + 1):
                line += 1
                if len(raw) > _MAX_ROW_BYTES:
                    _skip_line(file, raw)
                    yield line, _excerpt(raw), Unreadable(f"the line has more than {_MAX_ROW_BYTES // 2**20} MiB")
                elif raw.strip():
                    yield line, _excerpt(raw), _parse(raw)
    except (OSError, Unreadable) as error:
        yield line, "", Unreadable(f"not readable: {getattr(error, 'strerror', None) or error}")


def _skip_line(file: io.BufferedReader, raw: bytes) -> None:
    """Read to the end of the line that begins with `raw`. Raises Unreadable if that is too far."""
    skipped = 0
    while raw and not raw.endswith(b"\n"):
        raw = file.readline(_MAX_ROW_BYTES)
        skipped += len(raw)
        if skipped > _MAX_SKIPPED_BYTES:
            raise Unreadable(f"the line has more than {_MAX_SKIPPED_BYTES // 2**20} MiB, and nothing behind it was read")


def _excerpt(raw: bytes) -> str:
    return raw[: 4 * _EXCERPT].decode("utf-8-sig", "replace")[:_EXCERPT].rstrip("\r\n")


def _parse(content: bytes) -> object:
    try:
        return parse_json(content, ROW_DECODER)
    except Unreadable as error:
        return error


def _json_list(path: Path) -> Iterator[tuple[int, str, object]]:
    """The number of each item of a list, how it begins, and its value, or as a ValueError why the list ends there."""
    number = 1
    try:
        with open_regular(path) as file:
            text = _ListText(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""))
            if text.next_character() != "[":
                raise Unreadable("a .json file holds a list of rows; one row a line is .jsonl")
            mark = text.next_character(keep=True)
            while mark != "]":
                excerpt, value = text.next_value()
                yield number, excerpt, value
                number += 1
                mark = text.next_character()
                if mark not in (",", "]"):
                    raise Unreadable(f"not JSON: after a row comes {mark or 'nothing'}, and should come a comma or ]")
            if text.next_character(keep=True):
                raise Unreadable("not JSON: something follows the list of rows")
    except UnicodeDecodeError as error:
        yield number, "", Unreadable(f"not UTF-8: {error.reason}")
    except json.JSONDecodeError as error:
        yield number, "", Unreadable(f"not JSON: {error.msg}")
    except RecursionError:
        yield number, "", Unreadable("not JSON that is read here: it is nested too deeply")
    except ValueError as error:
        yield number, "", error
    except OSError as error:
        yield number, "", Unreadable(f"not readable: {error.strerror}")


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
        """The next value and how it begins. Raises what ROW_DECODER raises, Unreadable if it is too long."""
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
            excerpt = self._text[self._at : self._at + _EXCERPT]
            self._at = end
            return excerpt, value

    def _fill(self) -> bool:
        """Read as much again. Returns whether there was more. Raises Unreadable if the present value is too long."""
        pending = len(self._text) - self._at
        if pending > _MAX_ROW_BYTES:
            raise Unreadable(f"a row has more than {_MAX_ROW_BYTES // 2**20} million characters")
        more = self._file.read(max(_MIN_READ, pending))
        if more:
            self._text, self._at = self._text[self._at :] + more, 0
        return bool(more)


def _plain_text(value: Mapping[str, object]) -> str:
    text = value.get("text")
    if not isinstance(text, str):
        raise RowFault(f"no string under 'text'; its keys are {_keys(value)}")
    _check_unicode(text)
    return text


def _keys(value: Mapping[str, object]) -> str:
    return brief(sorted(value)[:8])


def _conversation(file: str, line: int, excerpt: str, value: Mapping[str, object]) -> Row:
    """A conversation. The keys of `value` tell its format: messages, conversations (ShareGPT), query/response, or Alpaca."""
    if "messages" in value:
        name, messages = "messages", _list_of_objects(value, "messages")
    elif "conversations" in value:
        name, messages = "conversations", _sharegpt(_list_of_objects(value, "conversations"))
    elif "query" in value or "response" in value:
        name, messages = "query/response", _query_response(value)
    elif "instruction" in value:
        name, messages = "instruction/output", _alpaca(value)
    else:
        raise RowFault(
            f"no known format: its keys are {_keys(value)}; known are messages, conversations, query + response, "
            "instruction + output"
        )
    if name != "messages" and isinstance(system := value.get("system"), str) and system:
        messages = [{"role": "system", "content": system}, *messages]
    tools = value.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise RowFault(f"'tools' is a {type(tools).__name__}, not a list")
    checked = tuple(_message(i, message) for i, message in enumerate(messages))
    if all(message["role"] != "assistant" for message in checked):
        raise RowFault("no assistant message")
    return Row(file, line, name, messages=checked, tools=None if tools is None else tuple(tools), excerpt=excerpt)


def _message(i: int, message: Mapping[str, object]) -> Message:
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise RowFault(f"message {i} has role {brief(role)}; known are {', '.join(_ROLES)}")
    if content is None and message.get("tool_calls"):
        return {**message, "content": ""}
    if not isinstance(content, str):
        raise RowFault(f"message {i} has content of type {type(content).__name__}, not a string")
    _check_unicode(content)
    return message


def _sharegpt(turns: list[Mapping[str, object]]) -> list[Message]:
    roles = [_SHAREGPT_ROLES.get(str(turn.get("from")), turn.get("from")) for turn in turns]
    return [{"role": role, "content": turn.get("value")} for role, turn in zip(roles, turns, strict=True)]


def _query_response(value: Mapping[str, object]) -> list[Message]:
    pairs = value.get("history") or []
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise RowFault("'history' is not a list of [query, response]")
    if "query" not in value or "response" not in value:
        raise RowFault(f"no {'query' if 'query' not in value else 'response'}")
    turns = [*pairs, (value["query"], value["response"])]
    return [{"role": role, "content": text} for pair in turns for role, text in zip(("user", "assistant"), pair, strict=True)]


def _alpaca(value: Mapping[str, object]) -> list[Message]:
    instruction, extra = value.get("instruction"), value.get("input")
    if "output" not in value:
        raise RowFault("no output")
    if extra and isinstance(instruction, str) and isinstance(extra, str):
        instruction = f"{instruction}\n{extra}"
    return [{"role": "user", "content": instruction}, {"role": "assistant", "content": value["output"]}]


def _list_of_objects(value: Mapping[str, object], key: str) -> list[Mapping[str, object]]:
    items = value[key]
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items) or not items:
        raise RowFault(f"'{key}' is not a list of objects with at least one")
    return items


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowFault(f"half a surrogate pair at character {error.start}") from error
