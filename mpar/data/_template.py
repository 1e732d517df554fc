"""Chat templates: jinja2 programs that turn messages into text; and which parts of this text the assistant wrote."""

import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import jinja2

import mpar
from mpar.data._template_process import MEMORY_BYTES, TIME_S
from mpar.data._template_render import make_environment
from mpar.data._token_weights import Piece, TokenWeights, WeightError
from mpar.errors import DataError

__all__ = ["ChatTemplate", "Conversation", "Message", "RenderError", "TemplateError"]

Message = Mapping[str, object]
"""One turn: at least `role` and `content`, both strings; templates may read more keys (`tool_calls`, `name`)."""

Conversation = tuple[Sequence[Message], Sequence[object] | None]
"""The messages, and the tools that they may call."""

_MAX_SOURCE = 2**18  # characters; the longest template that is published has thirty thousand
_BATCH_BYTES = 2**20
_WEIGHTS = ("loss", "weight", "loss_scale", "weights")  # of messages, which are not for templates
_GIVEN = frozenset(("messages", "tools", "documents", "add_generation_prompt"))
_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from mpar.data._template_process import main; main()"


class TemplateError(DataError):
    """A chat template that cannot be compiled, takes too much time or memory, or does not tell what the assistant wrote."""


class RenderError(DataError):
    """A conversation that its chat template refuses."""


class ChatTemplate:
    """A chat template, in the environment that the templates of Hugging Face expect.

    This is a sandbox without mutation, with `trim_blocks`, `lstrip_blocks`, loop controls, a `tojson` that keeps non-ASCII
    characters, `raise_exception`, and the generation markers. The template can read `variables` (`bos_token`, `eos_token`, ...).
    `strftime_now` exists only if `date` is given: with the present date, ranks could disagree at midnight, and a resumed run
    could differ from the first. `name` says in errors which template it is; `special_tokens` are those that may end an answer.
    `reads_tools` tells whether it reads the tools of a conversation anywhere; if not, no model sees them.

    A sandbox does not bound time and memory. So every template runs in a process of its own, which is started by the first
    conversation, bounded in both, and ends with `close`, with this object, or with its parent.

    Raises TemplateError if `source` is no jinja2.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str],
        *,
        special_tokens: Sequence[str] = (),
        date: datetime.date | None = None,
        name: str = "the chat template",
    ):
        self.source, self.name, self._special_tokens = source, name, tuple(special_tokens)
        if len(source) > _MAX_SOURCE:
            raise TemplateError(f"cannot use {name}: it has {len(source):,} characters, and at most {_MAX_SOURCE:,} are read.")
        try:
            environment = make_environment(date)
            parsed = environment.parse(source)  # which evaluates no expression
            macros = frozenset(macro.name for macro in parsed.find_all(jinja2.nodes.Macro))
            read = set(_names_read(parsed, macros))
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"cannot compile {name}: line {error.lineno}: {error.message}") from error
        except (RecursionError, ValueError, OverflowError) as error:  # the latter two from numbers of thousands of digits
            raise TemplateError(f"cannot compile {name}: {error}") from None
        self.reads_tools = "tools" in read
        self._free = read - _GIVEN - set(variables) - set(environment.globals)
        self._described = {
            "source": source,
            "variables": dict(variables),
            "special_tokens": list(special_tokens),
            "date": None if date is None else date.isoformat(),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = (0, 0)
        self._finalizer: weakref.finalize | None = None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[object] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The text of a conversation. `add_generation_prompt` adds the text that comes before the assistant's next answer.

        variables: what the template reads besides, such as `enable_thinking`; DataError is raised for one that it does not read.

        Raises RenderError if the template refuses the messages, TemplateError if it cannot be used.
        """
        request: dict[str, object] = {
            "kind": "render",
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "variables": dict(variables or {}),
        }
        wrong = sorted(set(variables or {}) - self._free)
        if wrong:
            there_are = f"its variables are {', '.join(sorted(self._free))}" if self._free else "it has no variables"
            raise DataError(f"{self.name} reads no {', '.join(wrong)}; {there_are}")
        value = next(self._ask([request]))
        if isinstance(value, RenderError):
            raise value
        return str(value)

    def weighed(
        self, conversations: Iterable[Conversation], weights: TokenWeights
    ) -> Iterator[tuple[str, list[Piece]] | RenderError]:
        """For each conversation its text and how much its parts weigh in the loss, or why the template refuses it.

        If the template marks answers with `{% generation %}`, these are taken. Otherwise an answer is the text that it adds after
        the generation prompt. White space that follows a closing special token is left out, because no model has to produce it.
        A conversation is refused if it is not certain where in the text an answer is.

        Raises TemplateError if the template takes too much time or memory, or loses marks.
        """
        asked: deque[Sequence[Message]] = deque()

        def requests() -> Iterator[dict[str, object]]:
            for messages, tools in conversations:
                asked.append(messages)
                shown = [{key: value for key, value in message.items() if key not in _WEIGHTS} for message in messages]
                yield {"kind": "spans", "messages": shown, "tools": tools, "answers": weights.answers(messages)}

        for value in self._ask(requests()):
            messages = asked.popleft()
            if isinstance(value, RenderError):
                yield value
                continue
            assert isinstance(value, list)
            text, spans = value
            try:
                yield text, weights.pieces(text, spans, messages, self._special_tokens)
            except WeightError as error:
                yield RenderError(f"cannot weigh a conversation: {error}")

    def __getstate__(self) -> dict[str, object]:
        """What a copy in another process has: all but the process, of which the copy starts one of its own."""
        return {**vars(self), "_process": None, "_owner": (0, 0), "_finalizer": None}

    def close(self) -> None:
        """End the process of this template. The next conversation would start another one."""
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None

    def _ask(self, requests: Iterable[dict[str, object]]) -> Iterator[object | RenderError]:
        """The answer to each request, in order, asked for in batches of about a million bytes."""
        lines: list[bytes | RenderError] = []
        size_bytes = 0
        for request in requests:
            lines.append(_line(request))
            size_bytes += len(lines[-1]) if isinstance(lines[-1], bytes) else 0
            if size_bytes > _BATCH_BYTES:
                yield from self._ask_batch(lines)
                lines, size_bytes = [], 0
        yield from self._ask_batch(lines)

    def _ask_batch(self, lines: Sequence[bytes | RenderError]) -> Iterator[object | RenderError]:
        sent = [line for line in lines if isinstance(line, bytes)]
        process = self._started() if sent else None
        if process is not None and process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # reading the answers says why
                process.stdin.write(b"%d\n" % len(sent) + b"".join(sent))
                process.stdin.flush()
        for line in lines:
            yield line if isinstance(line, RenderError) else self._read_answer()

    def _read_answer(self) -> object | RenderError:
        process = self._process
        assert process is not None and process.stdout is not None
        raw = process.stdout.readline()
        if not raw.endswith(b"\n"):
            code = process.wait()
            self.close()
            raise TemplateError(f"cannot use {self.name}: its process {_cause(code)}")
        answer = json.loads(raw.decode("utf-8", "surrogatepass"))
        if "unusable" in answer:
            self.close()
            raise TemplateError(f"cannot use {self.name}: it {answer['unusable']}")
        return RenderError(f"{self.name} {answer['refused']}") if "refused" in answer else answer["value"]

    def _started(self) -> subprocess.Popen[bytes]:
        """The process of this template. It ends with the thread that started it, so another thread or process has its own."""
        owner = (os.getpid(), threading.get_ident())
        if self._process is None or self._owner != owner:
            self.close()
            command = [sys.executable, "-P", "-c", _PROGRAM, str(Path(mpar.__file__).parents[1])]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=2**16
            )
            self._owner = owner
            self._finalizer = weakref.finalize(self, _end, self._process, os.getpid())
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({**self._described, "parent": os.getpid()}).encode() + b"\n")
        return self._process


def _names_read(node: jinja2.nodes.Node, bound: frozenset[str]) -> Iterator[str]:
    """The names that are read below a node, but for those of loops and macros in these. (jinja2.meta evaluates constants.)"""
    if isinstance(node, jinja2.nodes.Name):
        if node.ctx == "load" and node.name not in bound:
            yield node.name
        return
    own, outside = bound, list[jinja2.nodes.Node]()
    if isinstance(node, jinja2.nodes.For):
        targets = (node.target, *node.target.find_all(jinja2.nodes.Name))
        own = bound | {"loop", *(target.name for target in targets if isinstance(target, jinja2.nodes.Name))}
        outside = [node.iter, *node.else_]
    elif isinstance(node, (jinja2.nodes.Macro, jinja2.nodes.CallBlock)):
        own = bound | {name.name for name in node.args}
    for child in node.iter_child_nodes():
        yield from _names_read(child, bound if any(child is one for one in outside) else own)


def _line(value: dict[str, object]) -> bytes | RenderError:
    """A value as a line of JSON. Text may have halves of surrogate pairs, which are refused when the text is encoded."""
    try:
        return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        return RenderError(f"cannot give a conversation to a chat template: it is not JSON ({error}).")


def _cause(code: int) -> str:
    if code in (-signal.SIGALRM, -signal.SIGPROF):
        return (
            f"was stopped after {TIME_S:g} s of computing with one conversation, for which others need less than a "
            "millisecond. The template does not end, or takes far too long."
        )
    ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"{ended}. It may use {TIME_S:g} s for a conversation, and {MEMORY_BYTES // 2**20} MiB."


def _end(process: subprocess.Popen[bytes], parent: int) -> None:
    """Kill the process of a template, unless a fork of the process that started it calls this."""
    if os.getpid() != parent:
        return
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
    process.wait()
