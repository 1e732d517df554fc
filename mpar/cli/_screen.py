"""Prints on the screen: results on stdout; progress, notes and errors on stderr."""

import contextlib
import io
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from mpar.errors import MparError

if TYPE_CHECKING:
    from mpar.train import StepRecord  # loads torch, which a refusal does not need

__all__ = [
    "AnswerProgress",
    "ByteProgress",
    "CompileNotes",
    "CountProgress",
    "RowProgress",
    "StepProgress",
    "Word",
    "encode_everything",
    "fitted",
    "give_output_up",
    "print_table",
    "say",
    "say_aside",
    "show_error",
    "show_failure",
]

_BAR = 20  # characters of the bar on a terminal
_ANY_WIDTH = 10_000  # characters of a line


def encode_everything() -> None:
    """From now on what the screen's encoding lacks is printed as an escape, such as \\u4f60, and is no error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def give_output_up() -> None:
    """After nobody reads stdout any more: what is still printed goes nowhere, also when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_table(table: Table) -> None:
    """Print a table on stdout, in the width of the terminal; elsewhere lines are as long as they need, and no cell is cut."""
    Console(width=None if Console().is_terminal else _ANY_WIDTH, highlight=False).print(table)


def say(text: str) -> None:
    """Print a result on stdout, without changing it."""
    print(text, flush=True)


def say_aside(text: str, *, terminal: bool = False) -> None:
    """Print a note on stderr, without changing it. `terminal`: only if a person is likely to see it there.

    A terminal that is gone, which is what SIGHUP says, is no error.
    """
    if terminal and not sys.stderr.isatty():
        return
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def show_error(error: BaseException) -> None:
    """Print an MparError, which is a mistake of the user, as name and message; what the system refused, such as a full disk, with
    the place in the code; and any other error, a bug, as its traceback.
    """
    if isinstance(error, MparError):
        show_failure(type(error).__name__, str(error))
    elif isinstance(error, OSError):
        names = ", ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
        where = traceback.extract_tb(error.__traceback__)[-1]
        what = f"the system refused: {error.strerror or error}{f': {names}' if names else ''}"
        show_failure(type(error).__name__, f"{what}\n({where.name} in {where.filename}:{where.lineno})")
    else:
        say_aside("".join(traceback.format_exception(error)))


def show_failure(title: str, text: str) -> None:
    """Print a heading in red and the text below it. Lines are not wrapped, so that they can be copied."""
    console = Console(stderr=True, soft_wrap=True)
    console.print(Text(f"mpar: {title}", style="bold red"))
    console.print(Text(text))


class CompileNotes:
    """Says which program is compiled, in a line before and one behind, and sums up how long that took (`total_s`).

    shown: whether lines are printed. With Inductor a program takes from seconds to a minute; without, too little to talk about.
    """

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self.total_s = 0.0

    def warn(self, text: str) -> None:
        """Print what is not as one may expect: a program that is kept and was not used, or a length beyond that of the model."""
        say_aside(f"warning: {text}")

    @contextlib.contextmanager
    def __call__(self, what: str, *, shown: bool = False) -> Iterator[None]:
        """Stands around the work of compiling for `what`, in words. shown: print lines in any case."""
        began, shown = time.monotonic(), shown or self._shown
        if shown:
            say_aside(f"compiling for {what} ...")
        yield
        elapsed_s = time.monotonic() - began
        self.total_s += elapsed_s
        if shown:
            say_aside(f"compiled for {what} in {elapsed_s:.1f} s")


class ByteProgress:
    """How far work on many bytes has come: a bar on a terminal, else nothing. Call it with the bytes done, and all bytes."""

    def __init__(self, label: str, *, shown: bool) -> None:
        console = Console(stderr=True)
        columns = (TextColumn(label), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, disable=not (shown and console.is_terminal), transient=True)
        self._task = self._bar.add_task(label, total=None)

    def __enter__(self) -> "ByteProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` bytes are done."""
        self._bar.update(self._task, completed=done, total=total)


class RowProgress:
    """How many rows have been read and tokens made, and how fast: a line on a terminal, else nothing. Call it with both."""

    def __init__(self, label: str, *, shown: bool) -> None:
        console = Console(stderr=True)
        columns = (TextColumn(label), SpinnerColumn(), TextColumn("{task.fields[text]}"), TimeElapsedColumn())
        self._began = time.monotonic()
        self._bar = Progress(*columns, console=console, disable=not (shown and console.is_terminal), transient=True)
        self._task = self._bar.add_task(label, total=None, text="")

    def __enter__(self) -> "RowProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, num_rows: int, num_tokens: int) -> None:
        """Show that so many rows have been read, of which so many tokens were made."""
        self._bar.start()  # with the first rows
        elapsed_s = max(time.monotonic() - self._began, 1e-9)
        text = f"{num_rows:,} rows, {num_tokens:,} tokens, {num_rows / elapsed_s:,.0f} rows/s"
        self._bar.update(self._task, text=text)


class CountProgress:
    """How many of a known number of things are done: a bar on a terminal, else nothing. Call it with the number."""

    def __init__(self, label: str, total: int) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
        self._bar = Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal, transient=True)
        self._task = self._bar.add_task(label, total=total)

    def __enter__(self) -> "CountProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, done: int) -> None:
        """Show that so many are done."""
        self._bar.update(self._task, completed=done)


class AnswerProgress:
    """How many answers are complete, and how fast tokens come: a bar on a terminal, else nothing. Call it with both counts."""

    def __init__(self, num_answers: int, *, shown: bool) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("answers"), BarColumn(), TextColumn("{task.completed}/{task.total}  {task.fields[text]}"))
        self._began = time.monotonic()
        disable = not (shown and console.is_terminal)
        self._bar = Progress(*columns, TimeRemainingColumn(), console=console, disable=disable, transient=True)
        self._task = self._bar.add_task("answers", total=num_answers, text="")

    def __enter__(self) -> "AnswerProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, num_complete: int, num_tokens: int) -> None:
        """Show that so many answers are complete, and so many tokens have come."""
        elapsed_s = max(time.monotonic() - self._began, 1e-9)
        self._bar.update(self._task, completed=num_complete, text=f"{num_tokens / elapsed_s:,.0f} tokens/s")


@dataclass(frozen=True)
class Word:
    """A part of a line, and how soon it is left out where the line is too long: those of the highest number first, 0 never."""

    text: str
    number: int = 0


def fitted(words: Sequence[Word], width: int) -> str:
    """The words in their order, without as many of the less important ones as it takes to fit into `width` characters."""
    kept = [word for word in words if word.text]
    while len(line := "  ".join(word.text for word in kept)) > width and any(word.number for word in kept):
        kept.remove(max(kept, key=lambda word: word.number))
    return line[:width]


class StepProgress:
    """The progress of rank 0: one line on a terminal, which every step replaces; elsewhere a line for about every tenth of the
    steps. With `log_every` a line stays after every so many steps, on a terminal, too.
    """

    def __init__(self, first: int, last: int, *, shown: bool, log_every: int | None = None) -> None:
        self._first, self._last, self._shown = first, last, shown
        self._began = time.monotonic()
        self._held_out = ""
        self._console = Console(stderr=True)
        self._is_live = shown and self._console.is_terminal
        self._stride = log_every or max(1, (last - first) // 10)
        self._only_strides = log_every is not None
        self._live = Live(console=self._console, auto_refresh=False, transient=False)

    def __enter__(self) -> "StepProgress":
        if self._is_live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def __call__(self, record: "StepRecord") -> None:
        """Show one more step."""
        for note in record.notes:
            self._console.print(Text(f"mpar: {note}"), soft_wrap=True)
        if not self._shown:
            return
        evaluated = "" if record.eval_loss is None else f"eval {record.eval_loss:.4f}"
        evaluated += "".join(f" {name} {loss:.4f}" for name, loss in record.eval_losses.items())
        if record.eval_task_means:
            evaluated += f"  {_of_task(record.eval_task_means)}" if evaluated else f"held-out {_of_task(record.eval_task_means)}"
        self._held_out = evaluated or self._held_out
        at_times = record.step % self._stride == 0
        if not self._only_strides:
            at_times = at_times or record.step in (self._first + 1, self._last) or bool(evaluated)
        if self._is_live:
            if at_times and self._only_strides:
                self._console.print(Text(fitted(self._words(record, evaluated), self._console.width)))
            line = fitted(self._words(record, self._held_out, bar=True), self._console.width)
            self._live.update(Text(line, no_wrap=True), refresh=True)
        elif at_times:
            say_aside("  ".join(word.text for word in self._words(record, evaluated) if word.text))

    def _words(self, record: "StepRecord", evaluated: str, *, bar: bool = False) -> list[Word]:
        """The words of a line, which the step begins."""
        mean_s = (time.monotonic() - self._began) / (record.step - self._first)
        filled = _BAR * record.step // self._last if bar else 0
        return [
            Word(f"step {record.step}/{self._last}"),
            Word("━" * filled + "╌" * (_BAR - filled) if bar else "", 9),
            Word(f"loss {record.loss:.4f}", 1),
            Word(_of_task(record.task_means), 2),
            Word(_of_experts(record), 8),
            Word(f"{record.skipped} skipped" if record.skipped else "", 7),
            Word(evaluated, 3),
            Word(f"lr {record.lr:.3g}", 5),
            Word(f"norm {record.grad_norm:.3g}", 6),
            Word(f"{record.tokens_per_s:,.0f} tokens/s", 4),
            Word(f"{(self._last - record.step) * mean_s:.0f} s left", 2),
        ]


def _of_task(means: Mapping[str, float]) -> str:
    """What answers are worth, or how often pairs are told apart, and by how much, where a task reports that."""
    shown = (
        *(("reward", "reward"), ("accuracy", "rewards/accuracies"), ("accuracy", "accuracies")),
        *(("margin", "rewards/margins"), ("kl", "kl")),
    )
    return "  ".join(f"{word} {means[name]:.3g}" for word, name in shown if name in means)


def _of_experts(record: "StepRecord") -> str:
    """Side losses; with experts also the load of the busiest one, and the share that was dropped if any was."""
    words = [f"{name} {value:.4g}" for name, value in record.side_losses.items()]
    if record.expert_load:
        words += [f"max load {record.max_load:.2f}", *([f"dropped {100 * record.dropped:.1f} %"] if record.dropped else [])]
    return "  ".join(words)
