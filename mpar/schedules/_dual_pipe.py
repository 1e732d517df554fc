"""DualPipe: two copies of the model, microbatches from both ends of the pipeline at once."""

from collections import deque
from itertools import count

from mpar.schedules._action import Action
from mpar.schedules._sizes import check_sizes

__all__ = ["dual_pipe", "two_ways"]


def dual_pipe(rank: int, *, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    """DualPipe (DeepSeek-V3 report, arXiv:2412.19437, sec. 3.2.1).

    Where DualPipe runs a forward and a backward as one, the forward comes first here. Rank r has stage r for the first half of
    the microbatches and stage num_ranks - 1 - r for the second half, so parameters are stored twice. Needs an even number of
    ranks and of microbatches, and at least twice as many microbatches as ranks. Keeps at most num_ranks + 1 microbatches live.
    Rank 0 of 2, with 4:
        0F0 1F2  0F1 1B2 1F3 0B0  1B3 0I1  0W1
    """
    rules = {
        f"num_ranks is odd ({num_ranks}): two directions meet between two ranks; add or remove one, or use dual_pipe_v": num_ranks
        % 2
        == 0,
        f"num_microbatches is odd ({num_microbatches}): half of them go each way; add or remove one": num_microbatches % 2 == 0,
        f"{num_microbatches} microbatches are fewer than 2 * {num_ranks} ranks = {2 * num_ranks}: use that many, "
        f"fewer ranks, or zbv": num_microbatches >= 2 * num_ranks,
    }
    check_sizes("dual_pipe", rank, num_ranks, num_microbatches, 1, rules)
    half, each_way = num_ranks // 2, num_microbatches // 2
    down, up = (rank, 0), (num_ranks - 1 - rank, each_way)
    early, late = (down, up) if rank < half else (up, down)
    return two_ways(min(rank, num_ranks - 1 - rank), half, each_way, early, late)


def two_ways(
    position: int, depth: int, num_microbatches: int, early: tuple[int, int], late: tuple[int, int]
) -> tuple[Action, ...]:
    """The order of the rank at `position` of `depth`: one of its stages gets its microbatches early, the other one late.

    early, late: (stage, first of the `num_microbatches` microbatches that go through it).
    """
    order: list[Action] = []
    pending: deque[tuple[int, int]] = deque()  # (stage, microbatch) whose I is in the order and whose W is not yet
    counters = {(stage, kind): count(first) for stage, first in (early, late) for kind in "FB"}
    f0, b0, i0 = [(early[0], kind) for kind in "FBI"]
    f1, b1, i1 = [(late[0], kind) for kind in "FBI"]
    w = (-1, "W")

    def emit(times: int, *keys: tuple[int, str]) -> None:
        for _ in range(times):
            for stage, kind in keys:
                if kind == "W":
                    if pending:
                        oldest, microbatch = pending.popleft()
                        order.append(Action(oldest, "W", microbatch))
                    continue
                microbatch = next(counters[stage, "F" if kind == "F" else "B"])
                order.append(Action(stage, kind, microbatch))
                if kind == "I":
                    pending.append((stage, microbatch))

    after = depth - 1 - position
    num_pairs, odd = divmod(position + 1, 2)  # pairs of step 6 before its backwards are split
    emit(2 * after, f0)
    emit(position + 1, f0, f1)
    emit(after, i1, w, f1)
    emit(num_microbatches - 2 * depth + position + 1, f0, b1, f1, b0)
    emit(after, b1, f1, b0)
    emit(num_pairs, b1, b0)
    emit(odd, b1, i0)
    emit(position + 1 - num_pairs - odd, i1, i0)
    emit(after, w, i0)
    emit(position + 1, w)
    return tuple(order)
