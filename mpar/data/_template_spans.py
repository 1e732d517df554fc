"""Which parts of the text of a conversation the assistant wrote.

A template with `{% generation %}` says so itself. Of any other, the text that an answer adds is found by rendering the beginning
of the conversation with and without it. This needs no more where beginnings of the text are texts of beginnings. Templates that
show an answer differently once the conversation goes on (they leave out its thoughts, or put tools and system message elsewhere)
are rendered again with a word put into the answer, whose place is then found. Nothing is taken for an answer that was not found
both in the conversation and in its beginning.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from mpar.data._template_render import Message, Refused, Template

__all__ = ["assistant_spans"]

Span = tuple[int, int, int]
"""Half-open range of characters, and the number of the message; -1 if the template does not tell which message it is of."""

_OPENERS = ("<think>\n\n</think>\n\n", "<think>\n", "<think>")
"""What a generation prompt may begin an answer with; templates leave it out of answers that are not the last."""


def assistant_spans(
    template: Template, messages: Sequence[Message], tools: Sequence[object] | None, answers: Sequence[int]
) -> tuple[str, list[Span]]:
    """The text of a conversation, and the spans of the messages with the numbers `answers`, which are of the assistant.

    Raises Refused if the template refuses the messages or does not tell where an answer is, Unusable if it loses marks.
    """
    if not answers:
        return template.render(messages, tools, False), []
    if template.has_marks:
        text, spans = template.render_marked(messages, tools)
        return text, _owned(_Conversation(template, messages, tools, text), spans, answers)
    conversation = _Conversation(template, messages, tools, template.render(messages, tools, False))
    return conversation.text, [(*conversation.span(i), i) for i in answers]


def _owned(conversation: "_Conversation", spans: Sequence[tuple[int, int]], answers: Sequence[int]) -> list[Span]:
    """The marked spans that belong to the messages `answers`. Raises Refused."""
    every = [i for i, message in enumerate(conversation.messages) if message.get("role") == "assistant"]
    if len(spans) == len(every):
        return [(*span, i) for i, span in zip(every, spans, strict=True) if i in answers]
    if len(answers) == len(every):
        return [(*span, -1) for span in spans]
    if list(answers) == every[-len(answers) :]:
        start = conversation.start(answers[0])
        return [(*span, -1) for span in spans if span[0] >= start]
    raise Refused(f"marks {len(spans)} spans for {len(every)} answers, so it is not told which of them have no loss.")


@dataclass(frozen=True)
class _Conversation:
    """A conversation and its text."""

    template: Template
    messages: Sequence[Message]
    tools: Sequence[object] | None
    text: str

    def beginning(self, count: int, *, prompt: bool = False) -> str:
        """The text of the first messages alone, perhaps with what asks for the next answer."""
        if count == len(self.messages) and not prompt:
            return self.text
        return self.template.render(self.messages[:count], self.tools, prompt)

    def span(self, i: int) -> tuple[int, int]:
        """Where message `i` is in the text, from behind what asks for it up to the special token that ends it."""
        start, end = self.start(i), self.end(i)
        if end < start:
            raise self.untold(i, self.beginning(i + 1))
        return start, start + len(_without_space_behind(self.text[start:end], self.template.special_tokens))

    def start(self, i: int) -> int:
        """Where what asks for message `i` ends: that is the beginning of the text, or follows the message before."""
        prompt = self.beginning(i, prompt=True)
        length = _length_of_prompt(self.text, prompt)
        if length is not None:
            return length
        for _, behind, message in self.with_word(i - 1) if i else ():
            parts = self.render_with(i - 1, message, i, prompt=True).split(self.word)
            length = _length_of_prompt(behind, parts[1]) if len(parts) == 2 else None
            if length is not None:
                return len(self.text) - len(behind) + length
        raise self.untold(i, prompt)

    def end(self, i: int) -> int:
        """Where message `i` ends: its text alone is the beginning of the text, or what closes it alone follows its content."""
        alone = self.beginning(i + 1)
        if self.text.startswith(alone):
            return len(alone)
        for before, _, message in self.with_word(i):
            parts = self.render_with(i, message, i + 1).split(self.word)
            if len(parts) == 2 and alone.startswith(parts[0]):
                closing = _closing(alone[len(parts[0]) :], self.text[len(before) :], self.template.special_tokens)
                if closing is not None:
                    return len(before) + len(closing)
        raise self.untold(i, alone)

    @cached_property
    def word(self) -> str:
        """A word that neither the messages nor the text have."""
        taken = f"{self.text} {self.messages} {self.tools}"
        return next(word for n in range(len(taken) + 1) if (word := f"anchor{n}") not in taken)

    def with_word(self, i: int) -> Iterator[tuple[str, str, Message]]:
        """The text in front of the word that is put into message `i`, that behind it, and the message with the word."""
        for message in _with_word(self.messages[i], self.word):
            try:
                parts = self.render_with(i, message, len(self.messages)).split(self.word)
            except Refused:
                continue
            if len(parts) == 2 and _only_space_between(self.text, *parts):
                yield parts[0], parts[1], message

    def render_with(self, i: int, changed: Message, count: int, *, prompt: bool = False) -> str:
        """The text of the first messages alone, of which one is changed."""
        return self.template.render([*self.messages[:i], changed, *self.messages[i + 1 : count]], self.tools, prompt)

    def untold(self, i: int, beginning: str) -> Refused:
        pairs = enumerate(zip(self.text, beginning, strict=False))
        spot = next((at for at, (a, b) in pairs if a != b), min(len(self.text), len(beginning)))
        low = max(0, spot - 20)
        return Refused(
            f"does not tell what the assistant wrote in message {i} of {len(self.messages)}, because it is not prefix-stable: "
            f"the messages up to it alone render as {beginning[low : spot + 20]!r} where the whole conversation has "
            f"{self.text[low : spot + 20]!r} (character {spot}). Put {{% generation %}} ... {{% endgeneration %}} around "
            "assistant text in the template, or train on the last round only (data.token_weights=last_round), or give each "
            "answer a row of its own."
        )


def _length_of_prompt(text: str, prompt: str) -> int | None:
    """How many characters at the beginning of `text` ask for an answer. The thoughts that a prompt opens may be missing in it."""
    if text.startswith(prompt):
        return len(prompt)
    shorter = (prompt.removesuffix(opener) for opener in _OPENERS if prompt.endswith(opener))
    return next((len(start) for start in shorter if text.startswith(start)), None)


def _with_word(message: Message, word: str) -> Iterator[Message]:
    """The message with a word behind its content, or in the name of the first function that it calls."""
    content, calls = message.get("content"), message.get("tool_calls")
    calls = calls if isinstance(calls, list) else []
    if isinstance(content, str) and (content.strip() or not calls):
        yield {**message, "content": content.rstrip() + word}
    if calls and isinstance(calls[0], dict):
        function = calls[0].get("function", calls[0])
        if isinstance(function, dict):
            named = {**function, "name": f"{word}{function.get('name')}"}
            first = {**calls[0], "function": named} if "function" in calls[0] else named
            yield {**message, "tool_calls": [first, *calls[1:]]}


def _only_space_between(text: str, before: str, behind: str) -> bool:
    """Whether `text` is the one and the other, with nothing but white space between them."""
    end = len(text) - len(behind)
    return len(before) <= end and text.startswith(before) and text.endswith(behind) and not text[len(before) : end].strip()


def _closing(alone: str, text: str, special_tokens: Sequence[str]) -> str | None:
    """What ends an answer whose content is followed by `alone` where it is the last message, and by `text` in the conversation.

    A template may put more behind the last message. Then it is what both begin with, if that ends with a special token.
    """
    if text.startswith(alone):
        return alone
    length = next((i for i, (a, b) in enumerate(zip(alone, text, strict=False)) if a != b), min(len(alone), len(text)))
    for token in re.finditer("|".join(map(re.escape, special_tokens)) or "(?!)", alone):
        if token.start() < length < token.end():
            length = token.start()
    common = alone[:length].rstrip()
    return common if common.endswith(tuple(special_tokens)) and common else None


def _without_space_behind(answer: str, special_tokens: Sequence[str]) -> str:
    """An answer without the white space that follows the special token at its end: no model has to produce it."""
    stripped = answer.rstrip()
    return stripped if stripped.endswith(tuple(special_tokens)) else answer
