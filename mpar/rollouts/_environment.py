"""The environment of a conversation: a function of the user's own that replies to what the policy writes, or ends it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mpar.data import Message
from mpar.errors import MparError, RolloutError, brief
from mpar.plug_ins import PlugIn
from mpar.rollouts.rewards import OutOfTime, limited

__all__ = ["Conversation", "Environment", "make_environment"]

_ROLES = ("user", "tool", "system")


@dataclass(frozen=True)
class Conversation:
    """What an environment is given after each turn of the policy.

    messages: all messages so far, as dicts with `role` and `content`; the last one is what the policy wrote, a text.
    turn:     how often the policy has written, from 1.
    columns:  the other columns of the row, such as the solution. name: the file and line of the row.
    seed:     of whatever the environment draws, so that it draws the same on each mesh, and in a run that goes on.
    """

    messages: tuple[Message, ...]
    turn: int
    columns: Mapping[str, object]
    name: str
    seed: int

    @property
    def answer(self) -> str:
        """What the policy wrote last."""
        return str(self.messages[-1]["content"])


@dataclass(frozen=True)
class Environment:
    """A function of a `Conversation` that returns what comes next, and what it is called with besides.

    It returns None if the conversation is over; a text, which is a message of the user; a message, a dict with `role` (`user`,
    `tool` or `system`) and `content`; or a list of messages. What it returns must depend on what it is given alone.
    """

    name: str
    function: Callable[..., object]
    options: Mapping[str, object] = field(default_factory=dict)

    def replies(self, conversations: Sequence[Conversation], time_s: float | None) -> list[tuple[Message, ...]]:
        """The messages that follow each of some conversations, none if it is over. time_s: how long all calls together may take.

        Raises RolloutError, with the row and what the policy wrote, if the function raises, takes longer, or returns what is no
        message.
        """
        found: list[tuple[Message, ...]] = []
        at = conversations[0]
        try:
            with limited(time_s):
                for at in conversations:
                    found.append(_messages(self.function(at, **self.options)))
        except OutOfTime:
            ways = "Let it end the conversation by None, or allow it more time: they are for all turns of a rank together."
            raise self._error(at, f"the seconds of task.reward_time_s are over.\n{ways}") from None
        except _NoMessageError as error:
            ways = "Return None to end the conversation, a text, or a dict (or a list of dicts) with role and content."
            raise self._error(at, f"it returned {error}.\n{ways}") from None
        except MparError as error:
            raise self._error(at, str(error)) from error
        except (Exception, SystemExit) as error:
            raise self._error(at, f"it raised {type(error).__name__}: {error}") from error
        return found

    def _error(self, at: Conversation, reason: str) -> RolloutError:
        return RolloutError(
            f"cannot go on with a conversation: task.environment={self.name} was given turn {at.turn} of the one about "
            f"{at.name}, in which the policy wrote {brief(at.answer)}, and {reason}"
        )


class _NoMessageError(Exception):
    """Says what an environment returned that is no message."""


def make_environment(plug_in: PlugIn) -> Environment:
    """The environment that the user names. Raises ConfigError if it cannot be imported."""
    return Environment(plug_in.reference, plug_in.function(), plug_in.options)


def _messages(reply: object) -> tuple[Message, ...]:
    """What an environment returned, as messages."""
    if reply is None:
        return ()
    given = [{"role": "user", "content": reply}] if isinstance(reply, str) else [reply] if isinstance(reply, Mapping) else reply
    if not isinstance(given, list | tuple) or not given:
        raise _NoMessageError(f"{brief(reply)}, which is no message")
    for message in given:
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
            raise _NoMessageError(f"{brief(message)}, which is no dict with role and content")
        if message.get("role") not in _ROLES:
            raise _NoMessageError(f"a message with role={message.get('role')!r}, which is none of {', '.join(_ROLES)}")
    return tuple(dict(message) for message in given)
