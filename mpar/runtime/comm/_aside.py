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
    """A thread that waits for the network while the caller computes. It ends with the process. After an error it does nothing
    more: messages have no names, and others would take those of a later work for those of the one that failed."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[None], Callable[[], None]]] = queue.SimpleQueue()
        self._last: Future[None] | None = None
        threading.Thread(target=self._run, name="posted collectives", daemon=True).start()

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
        failure: BaseException | None = None
        while True:
            end, job = self._jobs.get()
            try:
                if failure is None:
                    job()
            except BaseException as error:
                failure = error
            if failure is None:
                end.set_result(None)
            else:
                end.set_exception(failure)
            del end, job  # and with them what they read


class _Stream:
    """For each stream of a caller one beside it, on which memory of results is allocated too.

    Before each work it waits for all that the caller has issued on its own stream. So memory that the caller gave back before is
    no longer read when it is used again, and the caller keeps `sent` until it has waited.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._beside: dict[int, torch.cuda.Stream] = {}

    def post(self, work: Work, sent: Sequence[Tensor]) -> Posted:
        """Issue `work` on the stream."""
        caller = torch.cuda.current_stream(self._device)
        if caller.cuda_stream not in self._beside:
            self._beside[caller.cuda_stream] = torch.cuda.Stream(self._device)
        beside = self._beside[caller.cuda_stream]
        beside.wait_stream(caller)
        with torch.cuda.stream(beside):
            results = work()
        end: Any = beside.record_event()
        return Posted(results, [Post(lambda: torch.cuda.current_stream(self._device).wait_event(end))], sent)

    def settle(self) -> None:
        """Nothing: the backend keeps the order in which the host issues collectives of one group, whatever their streams."""
