"""The file of answers of `mpar generate`: a JSON object in each line, written as answers end, and gone on with later."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from mpar.cli._prompts import Prompt
from mpar.errors import ConfigError, DataError

__all__ = ["RESULTS", "head_of", "kept_answers", "open_answers", "write_answer"]

RESULTS = ("answer", "finish", "tokens")
"""What the line of an answer has of the answer."""


def head_of(prompt: Prompt) -> dict[str, object]:
    """What the line of an answer begins with: what the line of the prompt has besides it, and the prompt or the conversation."""
    others = {name: value for name, value in prompt.others.items() if name not in RESULTS}
    asked = {"messages": prompt.messages} if prompt.messages is not None and prompt.has_messages else {"prompt": prompt.text}
    return {**others, **asked}


def kept_answers(path: Path, prompts: Sequence[Prompt], *, resume: bool) -> int:
    """How many answers, to the first of `prompts`, the file has already. The beginning of the next one, if any, is cut off.

    Raises ConfigError for a file with something in it unless `resume`, and DataError if that is something else.
    """
    if not path.is_file() or path.stat().st_size == 0:  # it may be /dev/stdout, too
        return 0
    if not resume:
        raise ConfigError(
            f"cannot write answers into {path}: it has something already. Go on behind the answers that it has with resume=true, "
            "give another name, or remove it."
        )
    with _unwritable_is_named(path), open(path, "r+b") as file:
        *lines, begun = file.read().split(b"\n")
        if len(lines) + bool(begun) > len(prompts):
            raise DataError(f"cannot go on with {path}: it has {len(lines) + bool(begun):,} lines, for {len(prompts):,} answers.")
        heads = [_encoded(head_of(prompt)).removesuffix(b"}") for prompt in prompts[: len(lines) + 1]]
        fit = [_is_answer(line, head) for line, head in zip(lines, heads, strict=False)]
        fit += [begun.startswith(heads[-1]) or heads[-1].startswith(begun)] if begun else []
        if not all(fit):
            wrong = fit.index(False)
            asked = prompts[wrong].text[:60]
            raise DataError(f"cannot go on with {path}: line {wrong + 1} is no answer to the prompt {asked!r}.")
        file.truncate(sum(len(line) + 1 for line in lines))
    return len(lines)


def _is_answer(line: bytes, head: bytes) -> bool:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return line.startswith(head) and "answer" in record


def _encoded(record: Mapping[str, object]) -> bytes:
    """As JSON in UTF-8. Half of a surrogate pair, which UTF-8 cannot say, is written as JSON escapes it."""
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace")


@contextlib.contextmanager
def open_answers(path: Path | None) -> Iterator[BinaryIO | None]:
    """The file, to write behind what it has; None for no path. Raises ConfigError if it cannot be written."""
    if path is None:
        yield None
        return
    with _unwritable_is_named(path):
        file = open(path, "ab")  # noqa: SIM115 (closed below, where an error is another one)
    try:
        yield file
    finally:
        with _unwritable_is_named(path):
            file.close()


def write_answer(file: BinaryIO, record: Mapping[str, object]) -> None:
    """Write a line, at once."""
    with _unwritable_is_named(file.name):
        file.write(_encoded(record) + b"\n")
        file.flush()


@contextlib.contextmanager
def _unwritable_is_named(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}.") from None
