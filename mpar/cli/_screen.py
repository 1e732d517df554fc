"""Prints on the screen: results on stdout; progress, notes and errors on stderr."""

import sys
import time
import traceback

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from mpar.errors import MparError
from mpar.train import StepRecord

__all__ = ["StepProgress", "say", "say_aside", "show_error", "show_failure"]


def say(text: str) -> None:
    """Print a result on stdout, without changing it."""
    print(text, flush=True)


def say_aside(text: str) -> None:
    """Print a note on stderr, without changing it."""
    print(text, file=sys.stderr, flush=True)


def show_error(error: BaseException) -> None:
    """Print an MparError, which is a mistake of the user, as name and message, and any other error, a bug, as its traceback."""
    if not isinstance(error, MparError):
        say_aside("".join(traceback.format_exception(error)))
        return
    show_failure(type(error).__name__, str(error))


def show_failure(title: str, text: str) -> None:
    """Print a heading in red and the text below it. Lines are not wrapped, so that they can be copied."""
    console = Console(stderr=True, soft_wrap=True)
    console.print(Text(f"mpar: {title}", style="bold red"))
    console.print(Text(text))


class StepProgress:
    """The progress of rank 0: a bar on a terminal; elsewhere a line for about every tenth of the steps."""

    def __init__(self, first: int, last: int, *, shown: bool) -> None:
        self._first, self._last, self._shown = first, last, shown
        self._began = time.monotonic()
        self._held_out = ""
        self._console = Console(stderr=True)
        self._live = shown and self._console.is_terminal
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("loss {task.fields[loss]}{task.fields[more]}{task.fields[held_out]}  {task.fields[rate]} tokens/s"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self._console,
            disable=not self._live,
        )
        self._task = self._bar.add_task("train", total=last, completed=first, loss="-", more="", held_out="", rate="-")

    def __enter__(self) -> "StepProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, record: StepRecord) -> None:
        """Show one more step."""
        loss, more, rate = f"{record.loss:.4f}", _of_experts(record), f"{record.tokens_per_s:,.0f}"
        if record.eval_loss is not None:
            self._held_out = f"  eval {record.eval_loss:.4f}"
        self._bar.update(self._task, completed=record.step, loss=loss, more=more, held_out=self._held_out, rate=rate)
        stride = max(1, (self._last - self._first) // 10)
        at_times = record.step % stride == 0 or record.step in (self._first + 1, self._last) or record.eval_loss is not None
        if self._shown and not self._live and at_times:
            held_out = "" if record.eval_loss is None else self._held_out
            mean_s = (time.monotonic() - self._began) / (record.step - self._first)
            left_s = (self._last - record.step) * mean_s
            say_aside(f"step {record.step}/{self._last}  loss {loss}{more}{held_out}  {rate} tokens/s  {left_s:.0f} s left")


def _of_experts(record: StepRecord) -> str:
    """Side losses; with experts also the load of the busiest one, and the share that was dropped if any was."""
    words = [f"{name} {value:.4g}" for name, value in record.side_losses.items()]
    if record.expert_load:
        words += [f"max load {record.max_load:.2f}", *([f"dropped {100 * record.dropped:.1f} %"] if record.dropped else [])]
    return "".join(f"  {word}" for word in words)
