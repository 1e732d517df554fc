"""Streams: on a GPU each queue of a program is a stream, and `issue_on_streams` issues the instructions as `mpar.ir.plan_streams`
says.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mpar.ir import HOME, START, Issue
from mpar.runtime.comm import Comm

__all__ = ["issue_on_streams"]

Function = Callable[[list[Tensor], Comm], tuple[Tensor, ...]]


def issue_on_streams(functions: Sequence[Function], issues: Sequence[Issue], device: torch.device) -> list[Function]:
    """The functions of a rank's instructions, each issued on the stream of its queue. With one queue they are unchanged."""
    queues = dict.fromkeys(issue.queue for issue in issues if issue.queue != HOME)
    if not queues:
        return list(functions)
    streams = {queue: torch.cuda.Stream(device) for queue in queues}
    events = {line: torch.cuda.Event() for line, issue in enumerate(issues) if issue.records} | {START: torch.cuda.Event()}
    pairs = enumerate(zip(functions, issues, strict=True))
    return [_issued(line, function, issue, streams, events, device) for line, (function, issue) in pairs]


def _issued(
    line: int, function: Function, issue: Issue, streams: Mapping[str, Any], events: Mapping[int, Any], device: torch.device
) -> Function:
    def run(args: list[Tensor], comm: Comm) -> tuple[Tensor, ...]:
        current = torch.cuda.current_stream(device)
        stream = streams.get(issue.queue, current)
        if line == 0:
            events[START].record(current)
        for awaited in issue.waits:
            stream.wait_event(events[awaited])
        with torch.cuda.stream(stream):
            results = function(args, comm)
        if issue.records:
            events[line].record(stream)
        for queue, awaited in issue.holds:
            streams.get(queue, current).wait_event(events[awaited])
        return results

    return run
