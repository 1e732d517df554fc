"""Prompts in a file: one in each line, or objects with a prompt or with the messages of a conversation."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mpar.errors import ConfigError, DataError, brief, first_lines
from mpar.files import Unreadable, read_text

__all__ = ["Prompt", "read_prompts"]

_MAX_BYTES = 2**30


@dataclass(frozen=True)
class Prompt:
    """Something to answer.

    text:         what is asked, or continued. messages: the conversation that ends with it; None: the text is continued as it is.
    has_messages: whether the file has the conversation, and not the text alone. tools: the functions that may be called in it.
    others:       the other values that its line in the file has; they are written beside the answer.
    line:         the number of that line, from 1 on.
    """

    text: str
    messages: Sequence[Mapping[str, object]] | None
    has_messages: bool = False
    others: Mapping[str, object] = field(default_factory=dict)
    line: int = 0
    tools: Sequence[object] | None = None


def read_prompts(path: Path, system: Sequence[Mapping[str, object]], *, chat: bool) -> list[Prompt]:
    """The prompts in a file, in order; `system` begins each conversation that has no system message of its own.

    Empty lines are left out. Raises ConfigError if the file cannot be read, DataError, with the lines and their problems, if one
    cannot be used or there is none.
    """
    try:
        lines = read_text(path, _MAX_BYTES).splitlines()
    except Unreadable as error:
        raise ConfigError(f"cannot read prompts from {path}: {error}.") from None
    is_json = path.suffix.lower() in (".jsonl", ".json")
    prompts: list[Prompt] = []
    problems: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        prompt = _of_json(line, system, chat=chat) if is_json else _of_text(line, system, chat=chat)
        if isinstance(prompt, str):
            problems.append(f"line {number}: {prompt}")
        else:
            prompts.append(replace(prompt, line=number))
    if problems or not prompts:
        raise DataError(f"cannot read prompts from {path}:\n  " + (first_lines(problems) or "it has no line that is not empty"))
    return prompts


def _of_text(text: str, system: Sequence[Mapping[str, object]], *, chat: bool) -> Prompt:
    return Prompt(text, [*system, {"role": "user", "content": text}] if chat else None)


def _of_json(line: str, system: Sequence[Mapping[str, object]], *, chat: bool) -> Prompt | str:
    """The prompt of a line of JSON, or why there is none."""
    try:
        value = json.loads(line)
    except ValueError as error:
        return f"it is no JSON: {error}"
    if not isinstance(value, dict):
        return f"it is {brief(value)}, no object with a prompt or messages"
    messages, text = value.get("messages"), value.get("prompt")
    tools = value.get("tools") if chat else None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        return f"tools must be a list of objects, and is {brief(tools)}"
    others = {name: item for name, item in value.items() if name not in ("messages", "prompt")}
    if isinstance(text, str) and messages is None:
        return Prompt(text, _of_text(text, system, chat=chat).messages, others=others, tools=tools)
    if messages is None:
        return "it has neither a text `prompt` nor `messages`"
    fits = (
        isinstance(messages, list) and messages and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages)
    )
    if not fits or messages[-1]["role"] == "assistant":
        return f"messages must be a list of objects with a role, the last of which is not the assistant's: {brief(messages)}"
    if not chat:
        return "it has messages, which need chat=true"
    begins = [] if messages[0]["role"] in ("system", "developer") else list(system)
    return Prompt(str(messages[-1].get("content")), [*begins, *messages], has_messages=True, others=others, tools=tools)
