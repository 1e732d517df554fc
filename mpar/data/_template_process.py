"""Runs a chat template, which a stranger may have written, in a process of its own with limits of time and memory.

`mpar/data/_template.py` starts `main` in another interpreter, which loads no torch, so that it starts in a tenth of a second.
Requests come on stdin: first a line that describes the template, then batches of conversations, each of which is a line with
their number and a line for each. For each conversation an answer of one line goes to stdout. All lines are JSON.
"""

import ctypes
import datetime
import json
import os
import resource
import signal
import sys
from typing import BinaryIO

from mpar.data._template_render import Refused, Template, Unusable, check_calls_shown, first_line
from mpar.data._template_spans import assistant_spans

__all__ = ["MEMORY_BYTES", "TIME_S", "main"]

TIME_S = 3.0
"""Seconds of computing that a template may take for one conversation; most need less than a millisecond."""
_WALL_S = 30.0  # the same on a machine that is busy with other work
MEMORY_BYTES = 3 * 2**28
"""Bytes of address space of the process. A conversation of eight million characters takes half of it."""

_KILL_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def main() -> None:
    """Answer the requests on stdin."""
    with open(0, "rb") as requests, open(1, "wb") as answers:
        _serve(requests, answers)


def _limit(parent: int) -> None:
    """Bound this process, and have it killed when its parent ends."""
    for kind, size in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0)):
        hard = resource.getrlimit(kind)[1]
        bound = size if hard == resource.RLIM_INFINITY else min(size, hard)
        resource.setrlimit(kind, (bound, bound))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the parent
    for alarm in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(alarm, signal.SIG_DFL)  # the kernel ends this process, whatever it is doing
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM, signal.SIGPROF})
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_KILL_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # it had ended before it could take this process with it
        sys.exit(0)


def _set_alarms(time_s: float, wall_s: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, time_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)


def _answer(template: Template, request: dict[str, object]) -> dict[str, object]:
    kind = request.pop("kind")
    try:
        value = template.render(**request) if kind == "render" else assistant_spans(template, **request)  # type: ignore[arg-type]
        check_calls_shown(request["messages"], value if isinstance(value, str) else value[0])  # type: ignore[arg-type]
    except Refused as error:
        return {"refused": str(error)}
    except (RecursionError, ValueError) as error:
        return {"refused": f"cannot be given the messages: {first_line(error)}."}
    return {"value": value}


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer until there are no more requests. A request that ends the template's use is the last one that is answered."""

    def answer(content: dict[str, object]) -> None:
        answers.write(json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
        answers.flush()  # what was answered must arrive even if the next conversation ends this process

    described = json.loads(requests.readline())
    _limit(described.pop("parent"))
    date = described.pop("date")
    try:
        _set_alarms(TIME_S, _WALL_S)
        template = Template(**described, date=None if date is None else datetime.date.fromisoformat(date))
        _set_alarms(0, 0)
        while count := requests.readline():
            lines = [requests.readline() for _ in range(int(count))]
            for line in lines:
                _set_alarms(TIME_S, _WALL_S)
                content = _answer(template, json.loads(line.decode("utf-8", "surrogatepass")))
                _set_alarms(0, 0)  # the parent may take its time to read
                answer(content)
    except Unusable as error:
        answer({"unusable": str(error)})
    except MemoryError:
        answer({"unusable": f"needs more than {MEMORY_BYTES // 2**20} MiB of memory."})
