"""The file of answers of `mpar generate`: a JSON object in each line, written as answers end, and gone on with later."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from mpar.cli._prompts import Prompt
from mpar.errors import ConfigError, DataError

__all__ = ["asked_in", "kept_answers", "open_answers", "write_answer"]


def asked_in(prompt: Prompt) -> dict[str, object]:
    """What the line of an answer has of its prompt: its text, or the conversation that the file of prompts has."""
    if prompt.messages is None or not prompt.has_messages:
        return {"prompt": prompt.text}
    return {"messages": prompt.messages}


def kept_answers(path: Path, prompts: Sequence[Prompt], *, resume: bool) -> int:
    """How many answers, to the first of `prompts`, the file has already. The beginning of a line that is behind them is cut off.

    Raises ConfigError for a file with something in it unless `resume`, and DataError if it has answers to other prompts.
    """
    if not path.is_file() or path.stat().st_size == 0:  # it may be /dev/stdout, too
        return 0
    if not resume:
        raise ConfigError(
            f"cannot write answers into {path}: it has something already. Go on behind the answers that it has with resume=true, "
            "give another name, or remove it."
        )
    with _unwritable_is_named(path), open(path, "r+b") as file:
        content = file.read()
        *lines, begun = content.split(b"\n")
        for number, (line, prompt) in enumerate(zip(lines, prompts, strict=False), 1):
            if not _answers(line, asked_in(prompt)):
                raise DataError(f"cannot go on with {path}: line {number} is no answer to the prompt {prompt.text[:60]!r}.")
        if begun and not begun.startswith(b"{"):
            raise DataError(f"cannot go on with {path}: behind line {len(lines)} it has what is no answer.")
        if len(lines) > len(prompts):
            raise DataError(f"cannot go on with {path}: it has {len(lines):,} lines, for {len(prompts):,} answers.")
        file.truncate(sum(len(line) + 1 for line in lines))
    return len(lines)


def _answers(line: bytes, asked: Mapping[str, object]) -> bool:
    """Whether a line of the file has an answer to what is asked."""
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return isinstance(record, dict) and "answer" in record and {name: record.get(name) for name in asked} == asked


@contextlib.contextmanager
def open_answers(path: Path | None) -> Iterator[TextIO | None]:
    """The file, to write behind what it has; None for no path. Raises ConfigError if it cannot be written."""
    if path is None:
        yield None
        return
    with _unwritable_is_named(path):
        file = open(path, "a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115 (closed below, where an error is another one)
    try:
        yield file
    finally:
        with _unwritable_is_named(path):
            file.close()


def write_answer(file: TextIO, record: Mapping[str, object]) -> None:
    """Write a line, at once. Half of a surrogate pair, which UTF-8 cannot say, is written as JSON escapes it."""
    with _unwritable_is_named(file.name):
        file.write(json.dumps(record, ensure_ascii=False) + "\n")
        file.flush()


@contextlib.contextmanager
def _unwritable_is_named(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}.") from None
