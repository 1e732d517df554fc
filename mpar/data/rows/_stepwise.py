"""Rows of which a task learns which steps of an answer are right."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mpar.data._template import Message
from mpar.data.rows._conversation import asked_before, keys_of, refuse_media, tools_of, with_system
from mpar.data.rows._message import check_unicode, message_of, parsed
from mpar.data.rows._row import RowFault
from mpar.errors import brief

__all__ = ["Steps", "stepwise"]


@dataclass(frozen=True)
class Steps:
    """A question and an answer in steps. columns: `completions`, the texts of the steps, and `labels`, whether each is right."""

    format: str
    messages: tuple[Message, ...]
    tools: tuple[object, ...] | None = None
    columns: Mapping[str, object] = field(default_factory=dict)


def stepwise(value: Mapping[str, object]) -> Steps:
    """A row with a question, `completions` and as many `labels`, as TRL has them. Raises RowFault, or Media."""
    refuse_media(value)
    asked = asked_before(value)
    if asked is None:
        raise RowFault(f"no question: its columns are {keys_of(value)}; a row of kind=prm has prompt, completions and labels")
    messages = [message_of(i, message) for i, message in enumerate(with_system(value, asked))]
    steps, labels = (parsed(value.get(key)) for key in ("completions", "labels"))
    if not isinstance(steps, list) or not steps or not all(isinstance(step, str) and step for step in steps):
        raise RowFault(f"'completions' is {brief(steps)}, not a list of texts")
    if not isinstance(labels, list) or not all(label in (True, False) for label in labels):
        raise RowFault(f"'labels' is {brief(labels)}, not a list of true and false")
    if len(labels) != len(steps):
        raise RowFault(f"{len(steps)} completions have {len(labels)} labels; each step has one")
    for step in steps:
        check_unicode(step)
    columns = {"completions": steps, "labels": [int(label) for label in labels]}
    return Steps("prompt/completions/labels", tuple(messages), tools_of(value), columns)
