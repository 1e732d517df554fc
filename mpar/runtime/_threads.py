"""Threads: on CPUs that talk over a network, each queue of a program with collectives is a thread, as it is a stream on a GPU.

The caller's thread hands an instruction of such a queue over and goes on. Its results are promises, which whoever reads them
waits for. `plan_threads` says what else must be in order. While a thread waits for the network, the caller's thread computes.
"""

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpar.ir import Instruction
from mpar.runtime._streams import HOME, Issue
from mpar.runtime.comm import Comm

__all__ = ["issue_on_threads", "kept"]

_MOST_UNDER_WAY = 2  # instructions of a thread: one that communicates, and the next, so that the network does not wait

Function = Callable[[list[Tensor], Comm], tuple[Tensor, ...]]


class _End:
    """The end of an instruction on a thread: it comes with its results, or with the error that it raised."""

    def __init__(self, line: int) -> None:
        self.line, self.done = line, threading.Event()
        self.error: BaseException | None = None

    def wait(self) -> None:
        """Wait for it. Raises the error."""
        self.done.wait()
        if self.error is not None:
            raise self.error


class _Promise:
    """A result that will be there at `end`. The instruction keeps none that nobody holds any more."""

    __slots__ = ("__weakref__", "end", "value")

    def __init__(self, end: _End) -> None:
        self.end = end
        self.value: Tensor | None = None


def kept(x: Any) -> Tensor:
    """The tensor `x`, or the one that the promise `x` stands for, once it is there."""
    if not isinstance(x, _Promise):
        return x
    x.end.wait()
    assert x.value is not None
    return x.value


def issue_on_threads(
    functions: Sequence[Function],
    instructions: Sequence[Instruction],
    issues: Sequence[Issue],
    comms: Mapping[str, Comm],
    progress: Callable[[int, Instruction], None] | None,
) -> list[Function]:
    """The functions of a rank's instructions, each issued on the thread of its queue, with the communication of that queue.

    progress: is called with the line of the instruction that the caller's thread waits for, and with its own again.
    """
    threads = {queue: _Thread(queue, comm) for queue, comm in comms.items()}
    ends: dict[int, _End] = {}
    return [
        _handed_over(line, function, issue, len(instruction.outputs), threads[issue.queue], ends)
        if issue.queue != HOME
        else _after(line, function, issue, instructions, ends, progress)
        for line, (function, instruction, issue) in enumerate(zip(functions, instructions, issues, strict=True))
    ]


class _Thread:
    """Runs what it is given, one after the other. After an error it runs nothing more, and all ends have that error."""

    def __init__(self, name: str, comm: Comm) -> None:
        self._comm = comm
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._given: deque[_End] = deque()
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name=f"queue {name}", daemon=True).start()

    def give(self, job: "_Job") -> None:
        """Run a job behind all others. Waits while too many are not done: their operands take memory."""
        while len(self._given) >= _MOST_UNDER_WAY:
            self._given.popleft().done.wait()
        self._given.append(job.end)
        self._jobs.put(job)

    def _run(self) -> None:
        torch.set_grad_enabled(False)  # of this thread
        while True:
            self._do(self._jobs.get())

    def _do(self, job: "_Job") -> None:
        try:
            if self._error is None:
                for other in job.waits:
                    other.wait()
                operands = [kept(x) for x in job.operands]
                job.operands.clear()
                for promise, x in zip(job.promises, job.function(operands, self._comm), strict=True):
                    held = promise()
                    if held is not None:
                        held.value = x
        except BaseException as error:
            self._error = error
        job.end.error = self._error
        job.end.done.set()


@dataclass(frozen=True)
class _Job:
    """Run `function` on `operands`, tensors or promises, after `waits`; its results fulfil `promises`."""

    function: Function
    operands: list[Any]
    waits: Sequence[_End]
    promises: Sequence[weakref.ref]
    end: _End


def _handed_over(
    line: int, function: Function, issue: Issue, num_results: int, thread: _Thread, ends: dict[int, _End]
) -> Function:
    def run(args: list[Tensor], comm: Comm) -> tuple[Tensor, ...]:
        end = ends[line] = _End(line)
        promises: Any = tuple(_Promise(end) for _ in range(num_results))
        waits = [ends[other] for other in issue.waits if other in ends]  # what ran on the caller's thread is done
        operands = args[:]
        args.clear()
        thread.give(_Job(function, operands, waits, [weakref.ref(promise) for promise in promises], end))
        return promises

    return run


def _after(
    line: int,
    function: Function,
    issue: Issue,
    instructions: Sequence[Instruction],
    ends: dict[int, _End],
    progress: Callable[[int, Instruction], None] | None,
) -> Function:
    def wait(end: _End) -> None:
        if progress is not None and not end.done.is_set():
            progress(end.line, instructions[end.line])
            end.wait()
            progress(line, instructions[line])
        end.wait()

    def run(args: list[Any], comm: Comm) -> tuple[Tensor, ...]:
        for other in issue.waits:
            if other in ends:
                wait(ends[other])
        for i, x in enumerate(args):
            if isinstance(x, _Promise):
                wait(x.end)
                args[i] = kept(x)
        results = function(args, comm)
        for _, other in issue.holds:
            if other in ends:
                wait(ends[other])
        return results

    return run
