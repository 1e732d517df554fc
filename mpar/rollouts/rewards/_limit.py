"""A limit of time for functions of the user's own, which may never return."""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import overload

from mpar.errors import RolloutError
from mpar.rollouts._rollout import Rollout

__all__ = ["Followed", "OutOfTime", "limited"]


class OutOfTime(BaseException):
    """The time of a function is over. It is no Exception, so that functions do not catch it with others."""


class Followed(Sequence[Rollout]):
    """Rollouts that remember which of them was read last."""

    def __init__(self, rollouts: Sequence[Rollout]) -> None:
        self._rollouts = rollouts
        self.last: Rollout | None = None

    def __len__(self) -> int:
        """How many there are."""
        return len(self._rollouts)

    @overload
    def __getitem__(self, index: int) -> Rollout: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Rollout]: ...

    def __getitem__(self, index: int | slice) -> Rollout | Sequence[Rollout]:
        """One of them, or some."""
        if isinstance(index, slice):
            return self._rollouts[index]
        self.last = self._rollouts[index]
        return self.last

    def __iter__(self) -> Iterator[Rollout]:
        """One after the other."""
        for rollout in self._rollouts:
            self.last = rollout
            yield rollout


@contextmanager
def limited(time_s: float | None) -> Iterator[None]:
    """Raise OutOfTime in what the main thread runs here, once `time_s` seconds are over, and each second from then on.

    The alarm interrupts Python, regular expressions, waiting for files, sockets, processes and locks. It does not interrupt code
    in C that never asks for signals. Raises RolloutError in another thread, which no alarm reaches.
    """
    if time_s is None:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        raise RolloutError("cannot limit the time of rewards or environments: a thread calls them that is not the main one.")

    def ring(number: int, frame: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, time_s, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
