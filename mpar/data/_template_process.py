"""Runs a chat template, which a stranger may have written, in a process of its own with limits of time and memory.

`mpar/data/_template.py` starts this file as a script. It imports nothing of mpar, so that it starts in a tenth of a second.
Requests come on stdin: first a line that describes the template, then batches of conversations, each of which is a line with
their number and a line for each. For each conversation an answer of one line goes to stdout. All lines are JSON.
"""

import ctypes
import datetime
import json
import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["MEMORY_BYTES", "TIME_S", "Refused", "Template", "Unusable", "make_environment"]

TIME_S = 3.0
"""Seconds of computing that a template may take for one conversation; most need less than a millisecond."""
_WALL_S = 30.0  # the same on a machine that is busy with other work
MEMORY_BYTES = 3 * 2**28
"""Bytes of address space of the process. A conversation of eight million characters takes half of it."""

Message = Mapping[str, object]
Span = tuple[int, int]

_MARKS = "mpar_generation_marks"  # the template's variable with the two characters that enclose what the assistant wrote
_KILL_WITH_PARENT = 1  # PR_SET_PDEATHSIG


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
            raise Unusable(f"does not compile: {_first_line(error)}") from None
        self._source, self._variables, self._special_tokens = source, dict(variables), special_tokens
        self._has_markers = re.search(r"{%[-+]?\s*generation\b", source) is not None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[object] | None,
        add_generation_prompt: bool,
        marks: tuple[str, str] | None = None,
    ) -> str:
        """The text of a conversation. Raises Refused."""
        variables = {**self._variables, _MARKS: marks}
        try:
            return self._template.render(
                variables, messages=list(messages), tools=tools, documents=None, add_generation_prompt=add_generation_prompt
            )
        except MemoryError:
            raise
        except Exception as error:  # whatever the expressions of a template can raise
            roles = [message.get("role") for message in messages[:8]]
            hint = " Give the tokenizer a date=." if "strftime_now" in str(error) else ""
            raise Refused(f"refuses messages with roles {roles}: {_first_line(error)}.{hint}") from None

    def assistant_spans(
        self, messages: Sequence[Message], tools: Sequence[object] | None, last_round: bool
    ) -> tuple[str, list[Span]]:
        """What `ChatTemplate.assistant_spans` gives for one conversation. Raises Refused or Unusable."""
        every = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        last_user = max((i for i, message in enumerate(messages) if message.get("role") == "user"), default=-1)
        answers = [i for i in every if messages[i].get("loss", True) and (i > last_user or not last_round)]
        messages = [{key: value for key, value in message.items() if key != "loss"} for message in messages]
        if not answers:
            return self.render(messages, tools, False), []
        if self._has_markers:
            text, spans = self._render_marked(messages, tools)
            return text, self._spans_of(answers, every, spans, messages, tools, text)
        text = self.render(messages, tools, False)
        spans = []
        for i in answers:
            start = self._prompt_length(messages, i, text, tools)
            end = len(self._beginning(messages, i + 1, text, tools, add_generation_prompt=False))
            if end < start:
                raise _unstable(messages, i + 1, text, text[:end])
            spans.append((start, start + len(self._strip_after_special(text[start:end]))))
        return text, spans

    def _spans_of(
        self,
        answers: Sequence[int],
        every: Sequence[int],
        spans: list[Span],
        messages: Sequence[Message],
        tools: Sequence[object] | None,
        text: str,
    ) -> list[Span]:
        """The marked spans that belong to the messages `answers`, some of `every` message of the assistant. Raises Refused."""
        if len(answers) == len(every):
            return spans
        if len(spans) == len(every):
            return [span for i, span in zip(every, spans, strict=True) if i in answers]
        if list(answers) == list(every[-len(answers) :]):
            start = self._prompt_length(messages, answers[0], text, tools)
            return [span for span in spans if span[0] >= start]
        raise Refused(f"marks {len(spans)} spans for {len(every)} answers, so it is not told which of them have no loss.")

    def _render_marked(self, messages: Sequence[Message], tools: Sequence[object] | None) -> tuple[str, list[Span]]:
        """The text of a conversation and the spans that `{% generation %}` encloses, in order."""
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

    def _prompt_length(self, messages: Sequence[Message], i: int, text: str, tools: Sequence[object] | None) -> int:
        return len(self._beginning(messages, i, text, tools, add_generation_prompt=True))

    def _beginning(
        self,
        messages: Sequence[Message],
        count: int,
        text: str,
        tools: Sequence[object] | None,
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The text of the first `count` messages. Raises Unusable unless it is a prefix of `text`."""
        beginning = self.render(messages[:count], tools, add_generation_prompt)
        if not text.startswith(beginning):
            raise _unstable(messages, count, text, beginning)
        return beginning

    def _strip_after_special(self, answer: str) -> str:
        stripped = answer.rstrip()
        return stripped if any(stripped.endswith(token) for token in self._special_tokens if token) else answer


def _unstable(messages: Sequence[Message], count: int, text: str, beginning: str) -> Unusable:
    spot = next((i for i, (a, b) in enumerate(zip(text, beginning, strict=False)) if a != b), min(len(text), len(beginning)))
    low = max(0, spot - 20)
    return Unusable(
        f"does not tell what the assistant wrote, because it is not prefix-stable. Of {len(messages)} messages, the first "
        f"{count} alone render as {beginning[low : spot + 20]!r} where the whole conversation has {text[low : spot + 20]!r} "
        f"(character {spot}). Put {{% generation %}} ... {{% endgeneration %}} around assistant text in the template, or train "
        "on the last round only (loss=last_round), or give each answer a row of its own."
    )


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


def _first_line(error: Exception) -> str:
    """What an error says, short enough for a message."""
    line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
    return (line + (str(error) or type(error).__name__))[:300]


def _limit(parent: int) -> None:
    """Bound this process, and have it killed when its parent ends."""
    for kind, size in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0)):
        hard = resource.getrlimit(kind)[1]
        bound = size if hard == resource.RLIM_INFINITY else min(size, hard)
        resource.setrlimit(kind, (bound, bound))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the parent
    for alarm in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(alarm, signal.SIG_DFL)  # the kernel ends this process, whatever it is doing
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM, signal.SIGPROF})
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_KILL_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # it had ended before it could take this process with it
        sys.exit(0)


def _set_alarms(time_s: float, wall_s: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, time_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)


def _answer(template: Template, request: dict[str, object]) -> dict[str, object]:
    kind = request.pop("kind")
    try:
        value = template.render(**request) if kind == "render" else template.assistant_spans(**request)  # type: ignore[arg-type]
    except Refused as error:
        return {"refused": str(error)}
    except (RecursionError, ValueError) as error:
        return {"refused": f"cannot be given the messages: {_first_line(error)}."}
    return {"value": value}


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer until there are no more requests. A request that ends the template's use is the last one that is answered."""

    def answer(content: dict[str, object]) -> None:
        answers.write(json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
        answers.flush()  # what was answered must arrive even if the next conversation ends this process

    described = json.loads(requests.readline())
    _limit(described.pop("parent"))
    date = described.pop("date")
    try:
        _set_alarms(TIME_S, _WALL_S)
        template = Template(**described, date=None if date is None else datetime.date.fromisoformat(date))
        _set_alarms(0, 0)
        while count := requests.readline():
            lines = [requests.readline() for _ in range(int(count))]
            for line in lines:
                _set_alarms(TIME_S, _WALL_S)
                content = _answer(template, json.loads(line.decode("utf-8", "surrogatepass")))
                _set_alarms(0, 0)  # the parent may take its time to read
                answer(content)
    except Unusable as error:
        answer({"unusable": str(error)})
    except MemoryError:
        answer({"unusable": f"needs more than {MEMORY_BYTES // 2**20} MiB of memory."})


if __name__ == "__main__":
    with open(0, "rb") as _requests, open(1, "wb") as _answers:
        _serve(_requests, _answers)
