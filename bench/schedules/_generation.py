"""CPU seconds to make, lower and verify the programs of all ranks: `python -m bench.schedules generation --torch-full`.

Beside them are those of torch.distributed.pipelining for the instructions of one rank, which every rank makes for itself, without
verification.
"""

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.pipelining import schedules as torch_schedules

from bench._machine import this_run
from bench._result import Json, Result
from mpar.schedules import actions, lower, verify

__all__ = ["FULL", "SMALL", "generation"]

FULL, SMALL = (64, 2, 512), (16, 2, 128)  # ranks, chunks, microbatches
PEERS = {
    "interleaved": "ScheduleInterleaved1F1B",
    "zb1p": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dual_pipe_v": "ScheduleDualPipeV",
    "looped_bfs": "ScheduleLoopedBFS",
}


class _Stage:
    """What torch needs to know of a stage to make an order."""

    submod = group = device = None
    has_backward = True

    def __init__(self, index: int, ranks: int, stages: int) -> None:
        self.stage_index, self.group_rank, self.group_size, self.num_stages = index, 0, ranks, stages
        self.is_first, self.is_last = index == 0, index == stages - 1


def generation(
    schedule: str, size: tuple[int, int, int], *, queues: str = "direction", repeats: int = 3, torch: bool = False
) -> Result:
    """A result with the fewest CPU seconds of `repeats` repetitions. Torch is timed once."""
    ranks, chunks, microbatches = size
    made, verified, instructions = [], [], 0
    for _ in range(repeats):
        lowered, seconds = _timed(lambda: lower(_table(schedule, size), queues=queues))
        made.append(seconds)
        verified.append(_timed(lambda program=lowered: verify(program, queues=queues))[1])
        instructions = sum(map(len, lowered))
    line: dict[str, Json] = {
        "config": "generation",
        "schedule": schedule,
        "ranks": ranks,
        "chunks": chunks,
        "microbatches": microbatches,
        "queues": queues,
        "instructions": instructions,
        "lower_s": round(min(made), 3),
        "verify_s": round(min(verified), 3),
    }
    if torch:
        line["torch_one_rank_s"] = round(_timed(lambda: _torch(schedule, size))[1], 3)
    return Result.of(line, this_run())


def _table(schedule: str, size: tuple[int, int, int]) -> list:
    ranks, chunks, microbatches = size
    return actions(schedule, num_ranks=ranks, num_chunks=chunks, num_microbatches=microbatches)


def _torch(schedule: str, size: tuple[int, int, int]) -> object:
    ranks, chunks, microbatches = size
    stages = ranks * chunks
    own: Sequence[int] = (0, stages - 1) if schedule in ("zbv", "dual_pipe_v") else range(0, stages, ranks)
    make: Callable = getattr(torch_schedules, PEERS[schedule])
    return make([_Stage(index, ranks, stages) for index in own], microbatches)


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    gc.collect()
    begun = time.process_time()
    result = work()
    return result, time.process_time() - begun
