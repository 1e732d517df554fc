"""Rows of which a task needs the question: the policy answers it, and rewards read the other columns."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mpar.data._template import Message
from mpar.data.rows._conversation import asked_before, keys_of, refuse_media, tools_of, with_system
from mpar.data.rows._message import message_of
from mpar.data.rows._row import RowFault

__all__ = ["MESSAGES", "Asked", "prompt"]

MESSAGES = "messages"
"""The column with the messages of a conversation up to its last question, if there are others before it."""

_OF_QUESTIONS = frozenset(
    ("messages", "conversations", "conversation", "prompt", "instruction", "input", "query", "question", "problem", "history",
     "system", "system_prompt", "tools")
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """A conversation up to its last question.

    format: how the row says it. columns: `prompt`, the text of the last question; MESSAGES, if there are others before it; and
    all that is no part of the question, such as the solution.
    """

    format: str
    messages: tuple[Message, ...]
    tools: tuple[object, ...] | None = None
    columns: Mapping[str, object] = field(default_factory=dict)


def prompt(value: Mapping[str, object]) -> Asked:
    """The question of a row: a prompt, question, query, problem or instruction, or messages, of which answers behind the last
    question are left out. Raises RowFault, or Media.
    """
    refuse_media(value)
    asked = asked_before(value)
    if asked is None:
        raise RowFault(
            f"no question: its columns are {keys_of(value)}; a prompt has messages, prompt, question, query or problem"
        )
    messages = [message_of(i, message) for i, message in enumerate(with_system(value, asked))]
    last = max((i for i, message in enumerate(messages) if message["role"] in ("user", "tool")), default=None)
    if last is None:
        raise RowFault("no question: no message is the user's")
    columns = {key: item for key, item in value.items() if key not in _OF_QUESTIONS}
    columns |= {MESSAGES: messages[: last + 1]} if last else {}
    return Asked("prompt", tuple(messages[: last + 1]), tools_of(value), {**columns, "prompt": messages[last]["content"]})
