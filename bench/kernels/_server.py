"""Server: a process that measures rows one after the other. If a row hangs or kills it, only that row is lost."""

from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from bench import _timing
from bench._child import Child, ChildFailed
from bench.kernels._measure import STICKY, measure
from bench.kernels._row import Row
from bench.kernels.rows import all_rows, long_rows
from tools import triton_interpreter

__all__ = ["Server"]


class Server:
    """Measures rows in another process, and starts a new one if that dies or does not answer in time."""

    def __init__(self, device: str, target: Callable[[Connection, str], None] | None = None) -> None:
        self.target = target or serve
        self._device = device
        self._child: Child | None = None
        self._partial: dict[str, Any] = {}

    def ceilings(self, timeout_s: float) -> dict[str, float]:
        """The ceilings of this machine. Raises RuntimeError if they could not be measured."""
        answer = self._ask(("ceilings",), timeout_s)
        if isinstance(answer, str):
            raise RuntimeError(f"the ceilings of this machine could not be measured: {answer}")
        return answer

    def measure(self, row: Row, ceilings: Mapping[str, float] | None, share: float, timeout_s: float) -> dict[str, Any]:
        """The line of results of a row. If the row is not done in time, it has what was known by then, or says that it failed."""
        answer = self._ask(("measure", row.key, ceilings, share), timeout_s)
        if isinstance(answer, str) and self._partial:
            return self._partial | {"cut": answer, "seconds": timeout_s}
        if isinstance(answer, str):
            return row.about() | {"status": "failed", "error": answer, "variants": {}, "bars": {}, "seconds": timeout_s}
        if any(words in answer.get("error", "") for words in STICKY):
            self.close()
        return answer

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def _ask(self, question: tuple[Any, ...], timeout_s: float) -> Any:
        if self._child is None:
            self._child = Child(self.target, self._device)
        self._partial = {}
        try:
            return self._child.ask(question, timeout_s)
        except ChildFailed as failure:
            self._partial = failure.partial
            self.close()
            return str(failure)


def serve(connection: Connection, device: str) -> None:
    """Answer questions until the connection is closed."""
    if device == "cpu":
        triton_interpreter.install()
    rows = {row.key: row for row in (*all_rows(), *long_rows())}
    while True:
        try:
            question, *rest = connection.recv()
        except EOFError:
            return
        if question == "ceilings":
            answer = _timing.ceilings()
        else:
            key, ceilings, share = rest
            answer = measure(rows[key], device, ceilings, share, lambda line: connection.send((False, line)))
        connection.send((True, answer))
        broken = any(words in str(answer.get("error", "")) for words in STICKY)
        if device == "cuda" and not broken:
            _timing.free()
