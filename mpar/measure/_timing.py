"""Timing: the seconds of one call, on a CPU or a GPU."""

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable

import torch

__all__ = ["in_turn", "seconds_of"]

_SETS = {"cpu": 8, "cuda": 2}


def seconds_of(call: Callable[[], object], device: torch.device, *, budget_s: float, repeats: int = 5) -> float:
    """Seconds of one call among many: the median of `repeats` loops, which together take about `budget_s`.

    On a GPU the host only waits at the end of a loop, so that launches overlap with what was launched before.
    """
    call()
    once = _loop(call, 1, device)
    number = max(1, int(budget_s / repeats / max(once, 1e-7)))
    return statistics.median(_loop(call, number, device) / number for _ in range(repeats))


def in_turn(make: Callable[[], Callable[[], object]], device: torch.device) -> Callable[[], object]:
    """A call of several that `make` makes, each with operands of its own, in turn. As in a step, operands come from memory, not
    from a cache, and results go to memory that was not written a moment ago, because the last ones are kept."""
    calls = itertools.cycle([make() for _ in range(_SETS[device.type])])
    results: deque[object] = deque(maxlen=_SETS[device.type])
    return lambda: results.append(next(calls)())


def _loop(call: Callable[[], object], number: int, device: torch.device) -> float:
    _finish(device)
    begun = time.perf_counter()
    for _ in range(number):
        call()
    _finish(device)
    return time.perf_counter() - begun


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
