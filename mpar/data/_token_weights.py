"""How much each token of a conversation weighs in the loss: by who wrote it, by what it says, and as the row itself says."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from mpar.errors import ConfigError, DataError

__all__ = ["BASES", "PATTERNS", "ROWS", "Piece", "TokenWeights", "WeightError"]

Message = Mapping[str, object]
Piece = tuple[int, int, float]
"""Half-open range of characters, and what each token in it weighs."""

BASES = ("default", "last_round", "all")
"""Which messages weigh anything: answers, answers behind the last message of the user, or the entire text."""
ROWS = "rows"
"""Weights of messages other than 0 and 1, and of parts of them, which rows give, are used."""

_REACT = {"Action:": (2.0, 2.0), "Action Input:": (2.0, 2.0), "Thought:": (1.0, 1.0), "Final Answer:": (1.0, 1.0)}
_OBSERVATION = {"Observation:": (2.0, 0.0)}
_CALLS = ("Name:", "Action:", "ACTION:", "Tool:", "Command", "Arguments:", "action input", "ACTION_INPUT:", "Action Input:")
_ASKS_FOR_CALLS = ("What is the tool you want to use", "What are the required parameter names", "What is the value of")
_EMPTY_THOUGHTS = (
    r"^<think>\s*</think>\s*",
    r"^<seed:think><seed:cot_budget_reflect>The current thinking budget is 0, so I will directly start answering the question."
    r"</seed:cot_budget_reflect>\n</seed:think>\s*",
    r"^</think>\s*",
    r"^<\|channel>thought\n<channel\|>",
    r"^</mm:think>\s*",
)

_Split = Callable[[str, str], Iterator[tuple[int, float]]]
"""From an answer and the question before it, the end of each part of the answer and what it weighs."""


def _by_markers(markers: Mapping[str, tuple[float, float]]) -> _Split:
    """Each marker and the text behind it, up to the next marker, weigh as the table says; what is before the first weighs 1."""
    pattern = re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))

    def split(answer: str, question: str) -> Iterator[tuple[int, float]]:
        behind = 1.0
        for found in pattern.finditer(answer):
            of_marker, after = markers[found[0]]
            yield found.start(), behind
            yield found.end(), of_marker
            behind = after
        yield len(answer), behind

    return split


def _by_pattern(weight: float, *patterns: str) -> _Split:
    """What matches weighs `weight`, all else 1."""
    pattern = re.compile("|".join(patterns), re.DOTALL)

    def split(answer: str, question: str) -> Iterator[tuple[int, float]]:
        for found in pattern.finditer(answer):
            yield found.start(), 1.0
            yield found.end(), weight
        yield len(answer), 1.0

    return split


def _agent_flan(answer: str, question: str) -> Iterator[tuple[int, float]]:
    if any(asked in question for asked in _ASKS_FOR_CALLS):
        return iter([(len(answer), 3.0)])
    thoughts = {"Thought:": (1.0, 1.0), "Final Answer:": (1.0, 1.0)}
    return _by_markers({**dict.fromkeys(_CALLS, (1.0, 3.0)), **thoughts, **_OBSERVATION})(answer, question)


PATTERNS: Mapping[str, _Split] = {
    "react": _by_markers({**_REACT, **_OBSERVATION}),
    "alpha_umi": _by_markers({**_REACT, **_OBSERVATION, "Next:": (2.0, 2.0)}),
    "qwen": _by_markers({"✿FUNCTION✿:": (2.0, 2.0), "✿ARGS✿:": (2.0, 2.0), "✿RETURN✿:": (1.0, 1.0), "✿RESULT✿:": (2.0, 0.0)}),
    "agentflan": _agent_flan,
    "hermes": _by_pattern(2.0, "<tool_call>.+?</tool_call>"),
    "ignore_empty_think": _by_pattern(0.0, *_EMPTY_THOUGHTS),
    "ignore_think_prefix": _by_pattern(0.0, r"^<think>\n?"),
}
"""The strategies of ms-swift's `loss_scale`, with its weights."""
_OF_0_AND_1 = ("ignore_empty_think", "ignore_think_prefix")


class WeightError(DataError):
    """A conversation whose own weights cannot be used."""


@dataclass(frozen=True)
class TokenWeights:
    """What weighs how much: that of `base`, in answers times the weight of each of `patterns`.

    A message with `loss` true or false counts or does not, whatever the base says. A message with a number under `weight` or
    `loss_scale` weighs that in place of the patterns, and ranges of its content what [begin, end, weight] under `weights` say.
    If `rows` is not set, numbers other than 0 and 1 are refused, because batches then have no weights.
    """

    base: str = "default"
    patterns: tuple[str, ...] = ()
    rows: bool = False

    @classmethod
    def parse(cls, text: str) -> "TokenWeights":
        """Read a base, patterns and `rows`, joined by +; the base may be left out. Raises ConfigError."""
        names = text.split("+")
        base = names.pop(0) if names[0] in BASES else "default"
        unknown = [name for name in names if name not in PATTERNS and name != ROWS]
        if unknown:
            raise ConfigError(
                f"{text!r} has {', '.join(map(repr, unknown))}: it is one of {', '.join(BASES)}, then any of "
                f"{', '.join((*PATTERNS, ROWS))}, joined by +"
            )
        return cls(base, tuple(name for name in names if name != ROWS), ROWS in names)

    @property
    def binary(self) -> bool:
        """Whether every token weighs 0 or 1, so that batches need no weights besides their labels."""
        return not self.rows and all(name in _OF_0_AND_1 for name in self.patterns)

    def answers(self, messages: Sequence[Message]) -> list[int]:
        """The numbers of the messages whose places in the text must be known."""
        return [i for i, message in enumerate(messages) if message.get("role") == "assistant" and self._looks_at(i, messages)]

    def pieces(
        self, text: str, spans: Sequence[tuple[int, int, int]], messages: Sequence[Message], special_tokens: Sequence[str]
    ) -> list[Piece]:
        """What weighs more than nothing in `text`, and the parts between. `spans` are the places of answers: characters, and the
        number of the message, -1 if it is not known. Raises WeightError.
        """
        if any(i < 0 for _, _, i in spans) and any(_has_own_weight(message) for message in messages):
            raise WeightError("the chat template does not tell which answer is whose, and some have weights of their own.")
        pieces: list[Piece] = []
        done = 0
        for start, end, i in spans:
            pieces += [(done, start, 1.0)] if self.base == "all" else []
            pieces += self._of_answer(text, start, end, messages, i, special_tokens)
            done = end
        pieces += [(done, len(text), 1.0)] if self.base == "all" else []
        odd = next((weight for _, _, weight in pieces if weight not in (0.0, 1.0)), None)
        if self.binary and odd is not None:
            raise WeightError(f"it gives a weight of {odd:g}: weights other than 0 and 1 need data.token_weights=default+{ROWS}.")
        return pieces

    def _looks_at(self, i: int, messages: Sequence[Message]) -> bool:
        if self.base == "all":
            return bool(self.patterns) or any(_has_own_weight(message) for message in messages)
        return self._counts(i, messages)

    def _counts(self, i: int, messages: Sequence[Message]) -> bool:
        """Whether an answer weighs anything before patterns are looked for."""
        given = messages[i].get("loss")
        if given is not None:
            return bool(given)
        if _weight_of(messages[i]) == 0:
            return False
        last_user = max((j for j, message in enumerate(messages) if message.get("role") == "user"), default=-1)
        return self.base != "last_round" or i > last_user

    def _of_answer(
        self, text: str, start: int, end: int, messages: Sequence[Message], i: int, special_tokens: Sequence[str]
    ) -> list[Piece]:
        """The pieces of an answer. What ends it weighs 1, as patterns are about its text."""
        if i < 0:
            message: Message = {}
        elif not self._counts(i, messages):
            return [(start, end, 0.0)]
        else:
            message = messages[i]
        own = _weight_of(message)
        if own is not None and not message.get("weights"):
            return [(start, end, own)]
        if message.get("weights"):
            return _by_range(text, start, end, message, 1.0 if own is None else own)
        if not self.patterns:
            return [(start, end, 1.0)]
        question = next((str(m.get("content")) for m in reversed(messages[: max(i, 0)]) if m.get("role") == "user"), "")
        written = _end_of_text(text[start:end], special_tokens)
        return [*self._by_patterns(text[start : start + written], start, question), (start + written, end, 1.0)]

    def _by_patterns(self, answer: str, start: int, question: str) -> list[Piece]:
        parts = [(0, len(answer), 1.0)]
        for name in self.patterns:
            divided = []
            for low, high, weight in parts:
                begin = low
                for end, factor in PATTERNS[name](answer[low:high], question):
                    divided += [(begin, low + end, weight * factor)] if low + end > begin else []
                    begin = low + end
            parts = divided
        return [(start + low, start + high, weight) for low, high, weight in parts]


def _has_own_weight(message: Message) -> bool:
    return any(message.get(key) is not None for key in ("loss", "weight", "loss_scale", "weights"))


def _weight_of(message: Message) -> float | None:
    given = message.get("weight", message.get("loss_scale"))
    return float(given) if isinstance(given, int | float) else None


def _by_range(text: str, start: int, end: int, message: Message, other: float) -> list[Piece]:
    """The pieces of an answer of whose content ranges of characters have weights. Raises WeightError."""
    content = str(message.get("content"))
    place = text.find(content, start, end)
    if place < 0 or text.find(content, place + 1, end) >= 0:
        raise WeightError("the chat template does not show the content of a message with `weights` as it is, and once.")
    ranges = cast(Sequence[tuple[int, int, float]], message["weights"])
    pieces, done = [], start
    for low, high, weight in sorted(ranges):
        if low < done - place or high > len(content):
            raise WeightError(f"`weights` overlap or are beyond the {len(content)} characters of their message.")
        pieces += [(done, place + low, other), (place + low, place + high, float(weight))]
        done = place + high
    return [*pieces, (done, end, other)]


def _end_of_text(answer: str, special_tokens: Sequence[str]) -> int:
    """Where the special tokens begin that end an answer."""
    end, found = len(answer), True
    while found:
        shorter = answer[:end].rstrip()
        token = next((token for token in special_tokens if token and shorter.endswith(token)), None)
        found = token is not None
        end = end if token is None else len(shorter) - len(token)
    return end
