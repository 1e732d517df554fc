"""Chat templates: jinja2 programs that turn messages into text; and which parts of this text the assistant wrote."""

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mpar.errors import DataError

__all__ = ["ChatTemplate", "Message", "RenderError", "Span", "TemplateError", "assistant_spans"]

Message = Mapping[str, object]
"""One turn: at least `role` and `content`, both strings; templates may read more keys (`tool_calls`, `name`)."""

Span = tuple[int, int]
"""Half-open range of characters."""

_MARKS = "mpar_generation_marks"  # the template's variable with the two characters that enclose what the assistant wrote


class TemplateError(DataError):
    """A chat template that cannot be compiled, or whose assistant spans cannot be found."""


class RenderError(DataError):
    """A conversation that its chat template refuses."""


class _Generation(Extension):
    """The jinja2 statement `{% generation %} ... {% endgeneration %}`, which encloses what the assistant wrote."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_enclose", [nodes.ContextReference()])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    @staticmethod
    def _enclose(context: Context, caller: Callable[[], str]) -> str:
        left, right = context.get(_MARKS) or ("", "")
        return left + caller() + right


class ChatTemplate:
    """A compiled chat template, in the environment that the templates of Hugging Face expect.

    This is a sandbox without mutation, with `trim_blocks`, `lstrip_blocks`, loop controls, a `tojson` that keeps non-ASCII
    characters, `raise_exception`, and the generation markers. The template can read `variables` (`bos_token`, `eos_token`, ...).
    `strftime_now` exists only if `date` is given: with the present date, ranks could disagree at midnight, and a resumed run
    could differ from the first.

    Raises TemplateError if `source` does not compile.
    """

    def __init__(self, source: str, variables: Mapping[str, str], *, date: datetime.date | None = None):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        if date is not None:
            environment.globals["strftime_now"] = date.strftime
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"cannot compile the chat template: line {error.lineno}: {error.message}") from error
        self.source = source
        self.has_markers = re.search(r"{%[-+]?\s*generation\b", source) is not None
        self._variables = dict(variables)

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False, tools: Sequence[object] | None = None
    ) -> str:
        """The text of a conversation. `add_generation_prompt` adds the text that comes before the assistant's next answer.

        Raises RenderError if the template refuses the messages.
        """
        return self._render(messages, add_generation_prompt, tools, None)

    def render_marked(self, messages: Sequence[Message], *, tools: Sequence[object] | None = None) -> tuple[str, list[Span]]:
        """The text of a conversation and the spans that `{% generation %}` encloses, in order."""
        left, right = _unused_characters(json.dumps([self.source, list(messages), tools], ensure_ascii=False, default=str))
        fragments = re.split(f"([{left}{right}])", self._render(messages, False, tools, (left, right)))
        text, spans, depth, length, start = [], [], 0, 0, 0
        for fragment in fragments:
            if fragment == left:
                depth, start = depth + 1, (length if depth == 0 else start)
            elif fragment == right:
                depth -= 1
                if depth == 0:
                    spans.append((start, length))
            else:
                text.append(fragment)
                length += len(fragment)
        if depth:
            raise TemplateError("the chat template cuts text inside {% generation %}: a marker is lost. Mark finished text only.")
        return "".join(text), spans

    def _render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: Sequence[object] | None,
        marks: tuple[str, str] | None,
    ) -> str:
        variables = {**self._variables, _MARKS: marks}
        try:
            return self._template.render(
                variables, messages=list(messages), tools=tools, documents=None, add_generation_prompt=add_generation_prompt
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            roles = [message.get("role") for message in messages]
            hint = " Give the tokenizer a date=." if "strftime_now" in str(error) else ""
            raise RenderError(f"the chat template refuses messages with roles {roles}: {error}.{hint}") from error


def assistant_spans(
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    special_tokens: Sequence[str],
    last_round: bool = False,
    tools: Sequence[object] | None = None,
) -> tuple[str, list[Span]]:
    """The text of a conversation and the spans on which the assistant is trained.

    If the template marks spans with `{% generation %}`, these are returned. Otherwise a span is the text that an answer adds
    after the generation prompt. White space that follows a closing special token is left out, because no model has to produce it.
    With `last_round`, only answers after the last user message count.

    Raises TemplateError if the text of the first messages is not the beginning of the text of all, because then the model would
    be trained on other text than it is asked with; RenderError if the template refuses the messages.
    """
    answers = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    if last_round:
        last_user = max((i for i, message in enumerate(messages) if message.get("role") == "user"), default=-1)
        answers = [i for i in answers if i > last_user]
    if not answers:
        return template.render(messages, tools=tools), []
    if template.has_markers:
        text, spans = template.render_marked(messages, tools=tools)
        if last_round:
            start = _prompt_length(template, messages, answers[0], text, tools)
            spans = [span for span in spans if span[0] >= start]
        return text, spans
    text = template.render(messages, tools=tools)
    spans = []
    for i in answers:
        start = _prompt_length(template, messages, i, text, tools)
        end = len(_beginning(template, messages, i + 1, text, tools, add_generation_prompt=False))
        if end < start:
            raise _unstable(messages, i + 1, text, text[:end])
        spans.append((start, start + len(_strip_after_special(text[start:end], special_tokens))))
    return text, spans


def _prompt_length(template: ChatTemplate, messages: Sequence[Message], i: int, text: str, tools: Sequence[object] | None) -> int:
    return len(_beginning(template, messages, i, text, tools, add_generation_prompt=True))


def _beginning(
    template: ChatTemplate,
    messages: Sequence[Message],
    count: int,
    text: str,
    tools: Sequence[object] | None,
    *,
    add_generation_prompt: bool,
) -> str:
    """The text of the first `count` messages. Raises TemplateError unless it is a prefix of `text`."""
    beginning = template.render(messages[:count], add_generation_prompt=add_generation_prompt, tools=tools)
    if not text.startswith(beginning):
        raise _unstable(messages, count, text, beginning)
    return beginning


def _unstable(messages: Sequence[Message], count: int, text: str, beginning: str) -> TemplateError:
    spot = next((i for i, (a, b) in enumerate(zip(text, beginning, strict=False)) if a != b), min(len(text), len(beginning)))
    low = max(0, spot - 20)
    return TemplateError(
        f"cannot tell what the assistant wrote: the chat template is not prefix-stable. Of {len(messages)} messages, the first "
        f"{count} alone render as {beginning[low : spot + 20]!r} where the whole conversation has {text[low : spot + 20]!r} "
        f"(character {spot}). Put {{% generation %}} ... {{% endgeneration %}} around assistant text in the template, or train "
        "on the last round only (loss=last_round), or give each answer a row of its own."
    )


def _strip_after_special(answer: str, special_tokens: Sequence[str]) -> str:
    stripped = answer.rstrip()
    return stripped if any(stripped.endswith(token) for token in special_tokens if token) else answer


def _unused_characters(text: str) -> tuple[str, str]:
    """Two private-use characters that do not occur in `text`."""
    used = set(text)
    unused = (c for c in map(chr, range(0xF0000, 0xFFFFE)) if c not in used)
    return next(unused), next(unused)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
