"""Threads: on CPUs, a queue of a program all of whose collectives go over a network is a thread, as it is a stream on a GPU.

The caller's thread hands an instruction of such a queue over and goes on. Its results are promises, which whoever reads them
waits for. `plan_threads` says what else must be in order. While a thread waits for the network, the caller's thread computes.
"""

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpar.ir import HOME, Instruction, Issue
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


def kept(x: "Tensor | _Promise") -> Tensor:
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

    progress: its method `waits`, if it has one, is called with the line that the caller's thread waits for, and then it is called
    with the line that goes on.
    """
    threads, caller = {queue: _Thread(queue, comm) for queue, comm in comms.items()}, _Caller(instructions, progress)
    return [
        _handed_over(line, function, issue, threads[issue.queue], caller)
        if issue.queue != HOME
        else _after(line, function, issue, caller)
        for line, (function, issue) in enumerate(zip(functions, issues, strict=True))
    ]


class _Caller:
    """The caller's thread: what it has handed over in this step, and how it waits for that."""

    def __init__(self, instructions: Sequence[Instruction], progress: Callable[[int, Instruction], None] | None) -> None:
        self.instructions, self._progress = instructions, progress
        self.ends: dict[int, _End] = {}

    def wait(self, end: _End, line: int) -> None:
        """Wait for `end` before `line` goes on. Raises its error."""
        waits = getattr(self._progress, "waits", None)
        if self._progress is None or waits is None or end.done.is_set():
            end.wait()
            return
        waits(end.line, self.instructions[end.line])
        end.wait()
        self._progress(line, self.instructions[line])

    def wait_for_lines(self, others: Iterable[int], line: int) -> None:
        """The same for all of these lines that other threads run; what the caller's thread ran is done."""
        for other in others:
            if other in self.ends:
                self.wait(self.ends[other], line)


class _Thread:
    """Runs what it is given, one after the other. After an error it runs nothing more, and all ends have that error."""

    def __init__(self, name: str, comm: Comm) -> None:
        self._comm = comm
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._given: deque[_End] = deque()
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name=f"queue {name}", daemon=True).start()

    def give(self, job: "_Job", caller: _Caller) -> None:
        """Run a job behind all others. The caller waits while too many are not done: their operands take memory."""
        while len(self._given) >= _MOST_UNDER_WAY:
            caller.wait(self._given.popleft(), job.end.line)
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


def _handed_over(line: int, function: Function, issue: Issue, thread: _Thread, caller: _Caller) -> Function:
    num_results = len(caller.instructions[line].outputs)

    def run(args: list[Tensor], comm: Comm) -> tuple[Tensor, ...]:
        end = _End(line)
        promises: Any = tuple(_Promise(end) for _ in range(num_results))
        waits = [caller.ends[other] for other in issue.waits if other in caller.ends]  # what the caller's thread ran is done
        operands = args[:]
        args.clear()
        thread.give(_Job(function, operands, waits, [weakref.ref(promise) for promise in promises], end), caller)
        caller.ends[line] = end
        return promises

    return run


def _after(line: int, function: Function, issue: Issue, caller: _Caller) -> Function:
    def run(args: list[Tensor], comm: Comm) -> tuple[Tensor, ...]:
        caller.wait_for_lines(issue.waits, line)
        operands: list[Any] = args
        for i in range(len(operands)):  # a variable for the operand would keep the last one alive while the code runs
            if isinstance(operands[i], _Promise):
                caller.wait(operands[i].end, line)
                operands[i] = kept(operands[i])
        results = function(args, comm)
        caller.wait_for_lines((other for _, other in issue.holds), line)
        return results

    return run
