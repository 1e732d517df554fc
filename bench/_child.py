"""Child: a process that answers questions. If it hangs or dies, its caller gets an exception."""

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

__all__ = ["Child", "ChildFailed"]


class ChildFailed(Exception):
    """The child did not answer. `partial`: what it had sent before that, {} if nothing."""

    def __init__(self, problem: str, partial: Any) -> None:
        super().__init__(problem)
        self.partial = partial


class Child:
    """`target(connection, *args)` in a process of its own. It sends `(whole, answer)`; if not `whole`, the answer is a part."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process: Any = context.Process(target=target, args=(theirs, *args), daemon=False)
        self._process.start()
        theirs.close()

    def ask(self, question: tuple[Any, ...], timeout_s: float) -> Any:
        """The whole answer. Raises ChildFailed, after which the child cannot be used any more."""
        ends, partial = time.perf_counter() + timeout_s, {}
        try:
            self._connection.send(question)
            while self._connection.poll(max(0.0, ends - time.perf_counter())):
                whole, answer = self._connection.recv()
                if whole:
                    return answer
                partial = answer
        except (EOFError, OSError):
            self._process.join(5)
            raise ChildFailed(f"the process died with code {self._process.exitcode}", partial) from None
        raise ChildFailed(f"no answer in {timeout_s:.0f} s", partial)

    def close(self) -> None:
        """End the process, by force if it does not end by itself."""
        self._connection.close()
        self._process.join(2)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
