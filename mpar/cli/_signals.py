"""Signals that ask a command to stop, from the keyboard, a closed terminal or a batch system: they become one exception."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from mpar.exit_codes import TIME_OVER, code_of_signal

__all__ = ["STOP_CODES", "Stopped", "code_name", "hold_signals", "ignore_signals", "signals_call", "signals_stop"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
STOP_CODES = (TIME_OVER, *map(code_of_signal, _SIGNALS))


class Stopped(BaseException):
    """The command was asked to stop. code: its exit code. The message is what to print, without a traceback.

    Not an Exception, so that nothing between a signal and the end of the command takes it for an error to recover from.
    """

    def __init__(self, code: int, text: str | None = None) -> None:
        super().__init__(text or f"stopped by {code_name(code)}")
        self.code = code

    def __reduce__(self) -> tuple[type["Stopped"], tuple[int, str]]:
        return type(self), (self.code, str(self))  # a launcher of a sweep may pass it on to another process


def code_name(code: int) -> str:
    """What asked for the exit code `code`: the name of a signal, or the key of the time limit."""
    return "time_limit" if code == TIME_OVER else signal.Signals(code - 128).name


@contextmanager
def signals_call(handle: Callable[[int], None]) -> Iterator[None]:
    """While this lasts, a signal calls `handle` with the exit code that it asks for.

    A signal that was ignored stays ignored, so that nohup works. In another thread than the main one nothing changes, because
    only the main thread may handle signals.
    """

    def call(number: int, frame: FrameType | None) -> None:
        handle(code_of_signal(number))

    taken = []
    if threading.current_thread() is threading.main_thread():
        taken = [(number, old) for number in _SIGNALS if (old := signal.getsignal(number)) is not signal.SIG_IGN]
    try:
        for number, _ in taken:
            signal.signal(number, call)
        yield
    finally:
        for number, old in taken:
            signal.signal(number, signal.SIG_DFL if old is None else old)


@contextmanager
def signals_stop() -> Iterator[None]:
    """While this lasts, a signal raises Stopped."""

    def stop(code: int) -> None:
        raise Stopped(code)

    with signals_call(stop):
        yield


def hold_signals() -> None:
    """From now on signals do nothing in this process where `signals_call` does not handle them."""
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: None)


def ignore_signals() -> None:
    """From now on signals do nothing in this process, also while Python ends it."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
