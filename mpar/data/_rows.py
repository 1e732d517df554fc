"""Reads rows of training data: finds the files of a source, recognises the formats of rows, and says which cannot be used."""

import glob
import json
import re
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from mpar.data._template import Message
from mpar.errors import DataError

__all__ = ["BadRow", "EmptyRow", "Row", "Source", "find_sources", "read_rows"]

PYTHON_STDLIB = "python-stdlib"
SELF_COGNITION = "self-cognition"

_ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}  # all other roles have the same name in both formats
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

    @property
    def where(self) -> str:
        """`file:line`, or only the file if the row is all of it."""
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True)
class BadRow:
    """One row that cannot be used."""

    where: str
    reason: str


@dataclass(frozen=True)
class EmptyRow:
    """A text without a character. Folders of source code have many such files, so this is no fault."""

    where: str


def find_sources(kind: str, names: tuple[str, ...]) -> tuple[Source, ...]:
    """The files that each name means: a path, a glob, `self-cognition` or `python-stdlib`; `NAME#N` asks for N rows.

    Files of a glob come in sorted order. Raises DataError naming every source that has no file or does not fit `kind`.
    """
    sources, faults = [], []
    for name in names:
        match = None if Path(name).exists() else re.fullmatch(r"(.+)#(\d+)", name)
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
    if Path(pattern).is_dir():
        raise RowFault(f"it is a folder; write '{pattern.rstrip('/')}/**/*.{'jsonl' if kind == 'sft' else 'txt'}'")
    names = [pattern] if Path(pattern).is_file() else sorted(glob.glob(pattern, recursive=True))
    files = tuple(path for path in map(Path, names) if path.is_file())
    if not files:
        raise RowFault("no such file")
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
    for line, value in _json_lines(path) if path.suffix == ".jsonl" else _json_list(path):
        try:
            if isinstance(value, RowFault):
                raise value
            if not isinstance(value, dict):
                raise RowFault(f"it is a JSON {type(value).__name__}, not an object")
            if kind == "pt":
                text = _plain_text(value)
                yield Row(str(path), line, "text", text=text) if text else EmptyRow(f"{path}:{line}")
            else:
                yield _conversation(str(path), line, value)
        except RowFault as fault:
            yield BadRow(f"{path}:{line}", str(fault))


def _text_file(path: Path) -> Row | BadRow | EmptyRow:
    """An entire file as one row. Line ends stay as they are; a byte-order mark is removed."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return BadRow(str(path), f"not UTF-8: {error.reason} at byte {error.start}")
    except OSError as error:
        return BadRow(str(path), f"not readable: {error.strerror}")
    return Row(str(path), 0, "file", text=text) if text else EmptyRow(str(path))


def _json_lines(path: Path) -> Iterator[tuple[int, object]]:
    try:
        with path.open("rb") as file:
            for line, raw in enumerate(file, start=1):
                content = raw.removeprefix(b"\xef\xbb\xbf") if line == 1 else raw
                if content.strip():
                    yield line, _parse(content)
    except OSError as error:
        yield 0, RowFault(f"not readable: {error.strerror}")


def _json_list(path: Path) -> Iterator[tuple[int, object]]:
    try:
        value = _parse(path.read_bytes().removeprefix(b"\xef\xbb\xbf"))
    except OSError as error:
        value = RowFault(f"not readable: {error.strerror}")
    if isinstance(value, list):
        yield from enumerate(value, start=1)
    else:
        yield 1, value if isinstance(value, RowFault) else RowFault("a .json file holds a list of rows; one row a line is .jsonl")


def _parse(content: bytes) -> object:
    try:
        return json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        return RowFault(f"not UTF-8: {error.reason} at byte {error.start}")
    except (ValueError, RecursionError) as error:
        return RowFault(f"not JSON: {error}")


def _plain_text(value: Mapping[str, object]) -> str:
    text = value.get("text")
    if not isinstance(text, str):
        raise RowFault(f"no string under 'text'; its keys are {sorted(value)[:8]}")
    _check_unicode(text)
    return text


def _conversation(file: str, line: int, value: Mapping[str, object]) -> Row:
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
            f"no known format: its keys are {sorted(value)[:8]}; known are messages, conversations, query + response, "
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
    return Row(file, line, name, messages=checked, tools=None if tools is None else tuple(tools))


def _message(i: int, message: Mapping[str, object]) -> Message:
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise RowFault(f"message {i} has role {role!r}; known are {', '.join(_ROLES)}")
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
