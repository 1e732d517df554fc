"""Aside: where posted collectives run, beside the ops of the caller: on a thread of a CPU, on a stream of a GPU."""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch
from torch import Tensor

from mpar.runtime.comm._protocol import Posted
from mpar.runtime.comm._shared_posts import Post

__all__ = ["Aside", "aside_of"]

Work = Callable[[], Sequence[Tensor]]


class Aside(Protocol):
    """Runs work in the order in which it is given, which is the same on all ranks."""

    def post(self, work: Work, sent: Sequence[Tensor]) -> Posted:
        """Run `work`, which reads `sent`, beside the caller; its results are there after the wait."""

    def settle(self) -> None:
        """Wait until nothing is under way that must not be mixed with collectives of the caller."""


def aside_of(device: torch.device) -> Aside:
    """Where posted collectives of tensors on `device` run."""
    return _Stream(device) if device.type == "cuda" else _Thread()


class _Thread:
    """A thread that waits for the network while the caller computes. It ends with the process."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[None], Callable[[], None]]] = queue.SimpleQueue()
        self._last: Future[None] | None = None
        threading.Thread(target=self._run, name="posted collectives", daemon=True).start()

    @torch.compiler.disable
    def post(self, work: Work, sent: Sequence[Tensor]) -> Posted:
        """Hand `work` to the thread."""
        results: list[Tensor] = []
        end: Future[None] = Future()
        self._jobs.put((end, lambda: results.extend(work())))
        self._last = end
        return Posted(results, [Post(end.result)], sent)

    def settle(self) -> None:
        """Wait until the thread is idle: messages of two ranks have no names and are matched in order."""
        if self._last is not None:
            self._last.result()
            self._last = None

    def _run(self) -> None:
        torch.set_grad_enabled(False)  # of this thread
        while True:
            end, job = self._jobs.get()
            try:
                job()
            except BaseException as error:
                end.set_exception(error)
            else:
                end.set_result(None)
            del end, job  # and with them what they read


class _Stream:
    """A stream, on which memory of results is allocated too.

    Before each work the stream waits for all that the caller has issued. So memory that the caller gave back before is no longer
    read when it is used again, and the caller keeps `sent` until it has waited.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    @torch.compiler.disable
    def post(self, work: Work, sent: Sequence[Tensor]) -> Posted:
        """Issue `work` on the stream."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            results = work()
        end: Any = self._stream.record_event()
        return Posted(results, [Post(lambda: torch.cuda.current_stream(self._device).wait_event(end))], sent)

    def settle(self) -> None:
        """Nothing: the backend keeps the order in which the host issues collectives of one group, whatever their streams."""
