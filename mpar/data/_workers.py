"""Processes that carry out one function on many items, in the order of the items."""

import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from types import TracebackType
from typing import Any, Generic, TypeVar

from mpar.errors import DataError
from mpar.parent_process import end_with_parent

__all__ = ["Workers"]

_AHEAD = 4  # items of each process that are under way or done
_Shared = TypeVar("_Shared")
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_given: list[object] = []


class Workers(Generic[_Shared, _Item, _Result]):
    """`count` processes, each of which calls `function(shared, item)`. With one or none, this process calls it itself.

    shared: what all calls are given, which every process is sent once. Processes start with the first item.
    """

    def __init__(self, function: Callable[[_Shared, _Item], _Result], shared: _Shared, count: int) -> None:
        self._function, self._shared, self._count = function, shared, count
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Workers[_Shared, _Item, _Result]":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def map(self, items: Iterable[_Item]) -> Iterator[tuple[_Item, _Result]]:
        """Each item with its result, in order. Items are taken a few ahead of the results.

        Raises what the function raised for an item, and DataError if a process was killed.
        """
        if self._count <= 1:
            for item in items:
                yield item, self._function(self._shared, item)
            return
        if self._pool is None:
            given = (self._function, self._shared, os.getpid())
            self._pool = ProcessPoolExecutor(self._count, get_context("spawn"), initializer=_begin, initargs=given)
        pending: deque[tuple[_Item, Future[_Result]]] = deque()
        try:
            for item in items:
                pending.append((item, self._pool.submit(_call, item)))
                if len(pending) > _AHEAD * self._count:
                    done, future = pending.popleft()
                    yield done, future.result()
            for done, future in pending:
                yield done, future.result()
        except BrokenProcessPool:
            raise DataError(
                f"one of the {self._count} processes that tokenise was killed, perhaps because memory was short.\n"
                "Use fewer of them: data.workers for a run, workers for `mpar preprocess`."
            ) from None


def _begin(function: Callable[[_Shared, _Item], _Result], shared: _Shared, parent: int) -> None:
    """What each process does first. It works on one core, since there are as many processes as cores are to be used; and Ctrl-C
    is for the process that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _given[:] = (function, shared)


def _call(item: _Item) -> Any:
    function, shared = _given
    return function(shared, item)  # type: ignore[operator]  # as _begin has put them
