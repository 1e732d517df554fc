"""Local search: moves actions on the longest path of an order to other places on their rank."""

import random
from typing import NamedTuple

from mpar.schedules._search import B, F, I, Order, Problem, Run, W, fits, run

__all__ = ["improve"]


class _Spot(NamedTuple):
    rank: int
    position: int


def improve(problem: Problem, order: Order, *, runs: int, seed: int, goal: float) -> Order:
    """The best order that `runs` moves find from this one; stops at a makespan of `goal` without span bubble.

    A move takes an action of the longest path to another place in its block (what the path passes on one rank without a wait), or
    past it. A move is kept if it is no worse than the order some moves ago (late acceptance; Burke & Bykov 2017): this crosses
    plateaus, which are wide.
    """
    chance = random.Random(seed)
    now = run(problem, order)
    assert now is not None
    best, best_run = order, now
    memory = [_price(now)] * 24
    path = _longest_path(problem, order, now)
    for attempt in range(runs):
        if best_run.makespan <= goal * (1 + 1e-9) and best_run.span_bubble <= 1e-9 * goal:
            break
        moved = _move(problem, order, path, chance)
        if moved is None:
            continue
        result = run(problem, moved)
        if result is None:
            continue
        price = _price(result)
        slot = attempt % len(memory)
        if price <= memory[slot] or price <= _price(now):
            order, now = moved, result
            path = _longest_path(problem, order, now)
            if (now.makespan, now.span_bubble) < (best_run.makespan, best_run.span_bubble):
                best, best_run = order, now
        memory[slot] = _price(now)
    return best


def _price(result: Run) -> float:
    """The makespan, plus a little for how late ranks end and how long they idle, which guides the search across plateaus."""
    ends = sum(ends[-1] for ends in result.end) / len(result.end)
    return result.makespan + 0.02 * ends + 0.01 * result.span_bubble


def _longest_path(problem: Problem, order: Order, result: Run) -> list[tuple[int, int, int]]:
    """Blocks (rank, first position, last position) of a longest path, from the last one to the first."""
    spots: dict[tuple[int, int, int], _Spot] = {}  # (stage, F or I, microbatch)
    seen: dict[tuple[int, int], int] = {}
    index_of: list[list[int]] = []
    for rank, codes in enumerate(order):
        indices = []
        for position, code in enumerate(codes):
            stage, kind = code >> 2, code & 3
            part = I if kind == B else kind
            index = seen.get((stage, part), 0)
            seen[stage, part] = index + 1
            indices.append(index)
            if kind != W:
                spots[stage, part, index] = _Spot(rank, position)
        index_of.append(indices)
    rank = max(range(len(order)), key=lambda r: result.end[r][-1])
    position = len(order[rank]) - 1
    blocks = []
    last = len(problem.place) - 1
    while True:
        end_of_block = position
        while position and result.end[rank][position - 1] >= result.start[rank][position]:
            position -= 1
        blocks.append((rank, position, end_of_block))
        code = order[rank][position]
        stage, kind, index = code >> 2, code & 3, index_of[rank][position]
        if (kind == F and stage == 0) or kind == W or result.start[rank][position] <= 0:
            return blocks
        if kind == F:
            rank, position = spots[stage - 1, F, index]
        elif stage == last:
            return blocks
        else:
            rank, position = spots[stage + 1, I, index]


def _move(problem: Problem, order: Order, path: list[tuple[int, int, int]], chance: random.Random) -> Order | None:
    """The order with one action in another place; None if the action drawn cannot go to the place drawn."""
    rank, first, last = path[chance.randrange(len(path))]
    codes = order[rank]
    draw = chance.random()
    if draw < 0.35:  # the block's first action and what it waits behind: let something else begin the block
        source, target = chance.randint(first, min(last, first + 6)), first
    elif draw < 0.7:  # the block's last: let it be reached sooner
        source, target = last, chance.randint(max(first, last - 6), last)
    else:
        source = chance.randint(first, last)
        target = source + chance.choice((-8, -4, -3, -2, -1, 1, 2, 3, 4, 8, 16))
    target = min(max(target, 0), len(codes) - 1)
    if source == target or codes[source] == codes[target]:
        return None
    moved = codes[:]
    moved.insert(target, moved.pop(source))
    low, high = min(source, target), max(source, target)
    if moved[low : high + 1] == codes[low : high + 1] or not _lawful(problem, moved) or not fits(problem, rank, moved):
        return None
    return [*order[:rank], moved, *order[rank + 1 :]]


def _lawful(problem: Problem, codes: list[int]) -> bool:
    """Whether every I follows its F and every W its I."""
    forwards, inputs, weights = ([0] * len(problem.place) for _ in range(3))
    for code in codes:
        stage, kind = code >> 2, code & 3
        if kind == F:
            forwards[stage] += 1
        elif kind == W:
            weights[stage] += 1
            if weights[stage] > inputs[stage]:
                return False
        else:
            inputs[stage] += 1
            if inputs[stage] > forwards[stage]:
                return False
            if kind == B:
                weights[stage] += 1
                if weights[stage] != inputs[stage]:
                    return False
    return True
