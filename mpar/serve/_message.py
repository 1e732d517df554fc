"""Message: what the text of an answer says: thoughts, content, and calls of tools, also while the text comes.

Thoughts stand between <think> and </think> (DeepSeek-R1, Qwen3), calls as JSON objects between <tool_call> and </tool_call>
(Hermes, Qwen2.5, Qwen3). A text that is not of this form is content, whatever it looks like.
"""

import json
import secrets
from dataclasses import dataclass

from mpar.infer import num_overlapping

__all__ = ["MessageParser", "Part"]

_ENDS = {"content": ("<think>", "<tool_call>"), "reasoning_content": ("</think>",), "call": ("</tool_call>",)}
_NEXT = {"<think>": "reasoning_content", "</think>": "content", "<tool_call>": "call", "</tool_call>": "content"}


@dataclass(frozen=True)
class Part:
    """A further part of a message: `kind` is content, reasoning_content or tool_call.

    text: what is said; of a call the arguments, as JSON. name, call: the name and the id of the called function.
    """

    kind: str
    text: str
    name: str = ""
    call: str = ""


class MessageParser:
    """Cuts the text of an answer into parts. `thinks`: whether it begins with thoughts; `calls`: whether it may call tools."""

    def __init__(self, *, thinks: bool = False, calls: bool = False) -> None:
        self._state = "reasoning_content" if thinks else "content"
        self._calls = calls
        self._text = ""  # what was not given out yet
        self._fresh = True  # nothing of this kind was given out yet: white space at its beginning is left out

    def push(self, text: str, *, at_end: bool = False) -> list[Part]:
        """Take more of the text; returns the parts that are certain. With `at_end` no more text comes."""
        self._text += text
        parts: list[Part] = []
        while True:
            found = [(self._text.index(mark), mark) for mark in self._marks() if mark in self._text]
            if not found:
                break
            index, mark = min(found)
            parts += self._give(self._text[:index], ends=True)
            self._text = self._text[index + len(mark) :]
            self._state, self._fresh = _NEXT[mark], True
        if at_end:
            text, self._text = self._text, ""
            parts += self._unfinished(text)
        elif self._state != "call":
            held = max((num_overlapping(self._text, mark) for mark in self._marks()), default=0)
            if self._state == "reasoning_content":  # line ends before the end of the thoughts are left out
                held = max(held, len(self._text) - len(self._text[: len(self._text) - held].rstrip("\n")))
            text, self._text = self._text[: len(self._text) - held], self._text[len(self._text) - held :]
            parts += self._give(text, ends=False)
        return parts

    def _marks(self) -> list[str]:
        return [mark for mark in _ENDS[self._state] if self._calls or mark != "<tool_call>"]

    def _give(self, text: str, *, ends: bool) -> list[Part]:
        if self._state == "call":
            return [_call(text)]
        if self._fresh:
            text = text.lstrip("\n")
        if ends and self._state == "reasoning_content":
            text = text.rstrip("\n")
        self._fresh = self._fresh and not text
        return [Part(self._state, text)] if text else []

    def _unfinished(self, text: str) -> list[Part]:
        """The end of the text, which may be in the middle of a call."""
        if self._state == "call" and text:
            self._state = "content"
            return [Part("content", f"<tool_call>{text}")]
        return self._give(text, ends=False)


def _call(text: str) -> Part:
    """The call that is written as this JSON, or the text as content, if it is none."""
    try:
        call = json.loads(text)
        name, arguments = call["name"], call.get("arguments", call.get("parameters"))
        if not isinstance(name, str) or not isinstance(arguments, (dict, str, type(None))):
            raise ValueError
        said = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return Part("content", f"<tool_call>{text}</tool_call>")
    return Part("tool_call", said, name, f"call_{secrets.token_hex(12)}")
