"""Rows of which a task learns what is better: pairs of a preferred and a rejected answer, and answers with a label.

Whatever else a row has travels with it, for the task to read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mpar.data._template import Message
from mpar.data.rows._conversation import (
    COLUMNS,
    asked_before,
    conversation,
    list_of_messages,
    refuse_media,
    tools_of,
    with_system,
)
from mpar.data.rows._message import message_of, parsed
from mpar.data.rows._row import RowFault
from mpar.errors import brief

__all__ = ["Judged", "labelled", "preference"]

_TRUE, _FALSE = ("true", "1", "1.0"), ("false", "0", "0.0")
_READ = frozenset((*COLUMNS, "conversation", "system_prompt"))


@dataclass(frozen=True)
class Judged:
    """A conversation whose last answer was judged. Answers before it have `loss` false.

    format: how the row says it. rejected: the same beginning with the rejected answer; empty for a single answer. columns:
    `label` (whether the answer is good) or `margin` (by how much the preferred one is better), and all that no format reads.
    """

    format: str
    messages: tuple[Message, ...]
    rejected: tuple[Message, ...] = ()
    tools: tuple[object, ...] | None = None
    columns: Mapping[str, object] = field(default_factory=dict)


def preference(value: Mapping[str, object]) -> Judged:
    """A pair: `chosen` and `rejected`, texts or messages behind a prompt, or conversations with the same beginning; or messages
    with `rejected_response` or `rejected_messages`. Raises RowFault, or Media.
    """
    refuse_media(value)
    if any(value.get(key) for key in ("rejected_response", "rejected_messages")):
        name, chosen, tools = conversation(value)
        prompt = _up_to_last_question(chosen)
        if value.get("rejected_messages"):
            side = list_of_messages(value, "rejected_messages")
        else:
            side = [*chosen[:prompt], *_answer(parsed(value["rejected_response"]), "rejected_response")]
        rejected = [message_of(i, message) for i, message in enumerate(side)]
        return _pair(f"{name} with a rejected one", list(chosen), rejected, tools, value)
    for key in ("chosen", "rejected"):
        if value.get(key) in (None, ""):
            raise RowFault(f"no {key}: a pair has chosen and rejected, or messages and rejected_response")
    asked = asked_before(value)
    if asked is not None:
        name = "prompt/chosen/rejected"
        sides = [[*asked, *_answer(parsed(value[key]), key)] for key in ("chosen", "rejected")]
    else:
        name = "chosen/rejected"
        sides = [list_of_messages(value, key) for key in ("chosen", "rejected")]
    better, worse = ([message_of(i, message) for i, message in enumerate(with_system(value, side))] for side in sides)
    return _pair(name, better, worse, tools_of(value), value)


def labelled(value: Mapping[str, object]) -> Judged:
    """A conversation, in any format, with `label`: whether its last answer is good. Raises RowFault, or Media."""
    if value.get("label") is None:
        raise RowFault("no label: a row of kind=kto has one, true or false")
    label = _bool(value["label"])
    name, messages, tools = conversation({key: item for key, item in value.items() if key != "label"})
    marked = _without_loss(list(messages), _up_to_last_question(messages))
    return Judged(f"{name} with a label", marked, (), tools, {"label": label, **_others(value)})


def _pair(
    name: str, chosen: list[Message], rejected: list[Message], tools: tuple[object, ...] | None, value: Mapping[str, object]
) -> Judged:
    if chosen == rejected:
        raise RowFault("the chosen and the rejected answer are the same")
    alike = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), min(len(chosen), len(rejected)))
    for key, side in (("chosen", chosen), ("rejected", rejected)):
        if len(side) == alike or side[-1]["role"] != "assistant":
            raise RowFault(f"{key} does not end with an answer of its own")
    if all(message["role"] == "system" for message in chosen[:alike]):
        raise RowFault("chosen and rejected do not begin with the same question")
    columns = _others(value)
    if value.get("margin") is not None:
        columns = {"margin": _number(value["margin"]), **columns}
    return Judged(name, _without_loss(chosen, alike), _without_loss(rejected, alike), tools, columns)


def _answer(given: object, key: str) -> list[Message]:
    """An answer that is a text, a message, or a list of messages."""
    if isinstance(given, str):
        return [{"role": "assistant", "content": given}]
    turns = [given] if isinstance(given, dict) else given
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise RowFault(f"'{key}' is {brief(given)}, not a text, a message, or a list of messages")
    return list_of_messages({key: turns}, key)


def _without_loss(messages: list[Message], count: int) -> tuple[Message, ...]:
    """The messages, of which answers among the first `count` are not trained on."""
    return tuple({**m, "loss": False} if i < count and m["role"] == "assistant" else m for i, m in enumerate(messages))


def _up_to_last_question(messages: tuple[Message, ...]) -> int:
    return max((i + 1 for i, message in enumerate(messages) if message["role"] == "user"), default=0)


def _others(value: Mapping[str, object]) -> dict[str, object]:
    return {key: item for key, item in value.items() if key not in _READ}


def _bool(label: object) -> bool:
    """A label. `bool("false")` is true, so texts of tables are read as what they say."""
    text = str(label).strip().lower()
    if isinstance(label, bool | int | float | str) and text in (*_TRUE, *_FALSE):
        return text in _TRUE
    raise RowFault(f"'label' is {brief(label)}, neither true nor false")


def _number(margin: object) -> float:
    try:
        number = float(margin) if isinstance(margin, int | float | str) and not isinstance(margin, bool) else float("nan")
    except ValueError:
        number = float("nan")
    if abs(number) < float("inf"):
        return number
    raise RowFault(f"'margin' is {brief(margin)}, not a number")
