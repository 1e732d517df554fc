"""Processes that carry out one function on many items, in the order of the items."""

import os
import pickle
import signal
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

from mpar.errors import DataError
from mpar.parent_process import end_with_parent

__all__ = ["Workers"]

_AHEAD = 24  # items of each process that are under way or done: as many as are done while the others start
_GIVEN = 4  # items that another process has or works on: this one looks after it once for each item of its own
_PARALLELISM = "TOKENIZERS_PARALLELISM"
_Shared = TypeVar("_Shared")
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_given: list[object] = []


class Workers(Generic[_Shared, _Item, _Result]):
    """`count` processes, each of which calls `function(shared, item)`. This process is one of them: it starts the others, hands
    out the items, and works on one itself whenever the result that is next in order is not there yet. With a count of one or
    none, it calls the function for all items.

    shared: what all calls are given, which every process is sent once. Processes start with the first item.
    """

    def __init__(self, function: Callable[[_Shared, _Item], _Result], shared: _Shared, count: int) -> None:
        self._function, self._shared, self._count = function, shared, count
        self._pool: ProcessPoolExecutor | None = None
        self._end = ExitStack()

    def __enter__(self) -> "Workers[_Shared, _Item, _Result]":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=kind is None, cancel_futures=True)
        self._end.close()

    def map(self, items: Iterable[_Item]) -> Iterator[tuple[_Item, _Result]]:
        """Each item with its result, in order. Items are taken a few ahead of the results.

        Raises what the function raised for an item, and DataError if a process was killed.
        """
        if self._count <= 1:
            for item in items:
                yield item, self._function(self._shared, item)
            return
        try:
            yield from self._map(iter(items))
        except BrokenProcessPool:
            raise DataError(
                f"one of the {self._count} processes that tokenise was killed, perhaps because memory was short.\n"
                "Use fewer of them: data.workers for a run, workers for `mpar preprocess`."
            ) from None

    def _map(self, items: Iterator[_Item]) -> Iterator[tuple[_Item, _Result]]:
        """The others are given items before this process takes one, so that none of them is idle meanwhile."""
        pool = self._pool = self._pool or self._started()
        pending: deque[tuple[_Item, Future[_Result]]] = deque()
        while True:
            num_free = _GIVEN * (self._count - 1) - sum(not future.done() for _, future in pending)
            for item in islice(items, max(0, num_free)):
                pending.append((item, pool.submit(_call, item)))
            if not pending:
                return
            waits = not pending[0][1].done() and len(pending) < _AHEAD * self._count
            here = next(items, None) if waits else None
            if here is not None:
                pending.append((here, self._done_here(here)))
            else:
                item, future = pending.popleft()
                yield item, future.result()

    def _started(self) -> ProcessPoolExecutor:
        """The other processes. What they share is in a file, because starting a process waits until it has read its arguments,
        which it does only when it has imported all that they are made of."""
        folder = self._end.enter_context(tempfile.TemporaryDirectory(prefix="mpar-workers-"))
        shared = Path(folder) / "shared"
        shared.write_bytes(pickle.dumps((self._function, self._shared)))
        return ProcessPoolExecutor(self._count - 1, get_context("spawn"), initializer=_begin, initargs=(shared, os.getpid()))

    def _done_here(self, item: _Item) -> "Future[_Result]":
        """The result of an item, or its error, which is raised only when those of the items before it have been."""
        future: Future[_Result] = Future()
        try:
            with _on_one_core():
                future.set_result(self._function(self._shared, item))
        except Exception as error:  # any: the caller gets it in the order of the items
            future.set_exception(error)
        return future


def _begin(shared: Path, parent: int) -> None:
    """What each process does first. It works on one core, since there are as many processes as cores are to be used; and Ctrl-C
    is for the process that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent)
    os.environ[_PARALLELISM] = "false"
    try:
        _given[:] = pickle.loads(shared.read_bytes())  # of the process that started this one
    except FileNotFoundError:  # which has given up before this one had begun
        os._exit(1)


def _call(item: _Item) -> Any:
    function, shared = _given
    return function(shared, item)  # type: ignore[operator]  # as _begin has put them


@contextmanager
def _on_one_core() -> Iterator[None]:
    """Let the library tokenizers use one thread."""
    before = os.environ.get(_PARALLELISM)
    os.environ[_PARALLELISM] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PARALLELISM]
        else:
            os.environ[_PARALLELISM] = before
