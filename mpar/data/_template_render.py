"""Renders conversations by a chat template, in the environment that the templates of Hugging Face expect."""

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

__all__ = ["Message", "Refused", "Template", "Unusable", "check_calls_shown", "first_line", "make_environment"]

Message = Mapping[str, object]

_MARKS = "mpar_generation_marks"  # the template's variable with the two characters that enclose what the assistant wrote
_REASONING = ("reasoning_content", "thinking", "reasoning")  # what the thoughts of an answer are called, the first one most often


class Refused(Exception):
    """The template refuses a conversation."""


class Unusable(Exception):
    """The template itself cannot be used."""


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


def make_environment(date: datetime.date | None) -> ImmutableSandboxedEnvironment:
    """The environment that the templates of Hugging Face expect, as `ChatTemplate` describes it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    if date is not None:
        environment.globals["strftime_now"] = date.strftime
    return environment


class Template:
    """A compiled template. Raises Unusable if it does not compile."""

    def __init__(
        self, source: str, variables: Mapping[str, str], special_tokens: Sequence[str], date: datetime.date | None = None
    ) -> None:
        try:
            self._template = make_environment(date).from_string(source)
        except MemoryError:
            raise
        except Exception as error:  # nesting that Python does not compile, and the like
            raise Unusable(f"does not compile: {first_line(error)}") from None
        self._source, self._variables = source, dict(variables)
        self.special_tokens = tuple(token for token in special_tokens if token)
        self.has_marks = re.search(r"{%[-+]?\s*generation\b", source) is not None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[object] | None,
        add_generation_prompt: bool,
        marks: tuple[str, str] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The text of a conversation. variables: what the template may read besides. Keys of messages that are null are left out,
        and the thoughts of an answer have all names that templates know them by, as in transformers. Raises Refused.
        """
        shown = [_shown(message) for message in messages]
        try:
            return self._template.render(
                {**(variables or {}), **self._variables, _MARKS: marks},
                messages=shown,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except MemoryError:
            raise
        except Exception as error:  # whatever the expressions of a template can raise
            roles = [message.get("role") for message in messages[:8]]
            hint = " Give the tokenizer a date=." if "strftime_now" in str(error) else ""
            raise Refused(f"refuses messages with roles {roles}: {first_line(error)}.{hint}") from None

    def render_marked(self, messages: Sequence[Message], tools: Sequence[object] | None) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation and the spans that `{% generation %}` encloses, in order. Raises Refused or Unusable."""
        left, right = _unused_characters(json.dumps([self._source, messages, tools], ensure_ascii=False))
        fragments = re.split(f"([{left}{right}])", self.render(messages, tools, False, (left, right)))
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
            raise Unusable("cuts text inside {% generation %}: a marker is lost. Mark finished text only.")
        return "".join(text), spans


def check_calls_shown(messages: Sequence[Message], text: str) -> None:
    """Raise Refused if `text`, which a template made of `messages`, lacks the name of a function that one of them calls.

    Templates that know nothing of tools leave calls out: the model would learn to answer nothing where it should call.
    """
    for i, message in enumerate(messages):
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function", call) if isinstance(call, Mapping) else None
            name = function.get("name") if isinstance(function, Mapping) else None
            if isinstance(name, str) and name not in text and json.dumps(name)[1:-1] not in text:
                raise Refused(
                    f"does not show that message {i} of {len(messages)} calls the function {name!r}: its text lacks the name. "
                    "Use a tokenizer whose template shows calls of tools, or write them into the contents of the messages."
                )


def first_line(error: Exception) -> str:
    """What an error says, short enough for a message."""
    line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
    return (line + (str(error) or type(error).__name__))[:300]


def _shown(message: Message) -> Message:
    """A message as templates get it."""
    given = {key: value for key, value in message.items() if value is not None}
    thoughts = next((given[key] for key in _REASONING if key in given), None)
    return given if thoughts is None else {"thinking": thoughts, **given, "reasoning_content": thoughts}


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
