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

    A block is a run of actions of the longest path that follow each other on one rank without a wait. A move takes an action of a
    block to another place in it, or to a place near it. A move is kept if the order is then no worse than the current one or than
    the one some moves ago (late acceptance; Burke & Bykov 2017), so that the search crosses plateaus, which are wide.
    """
    rng = random.Random(seed)
    current = run(problem, order)
    assert current is not None
    best, best_run = order, current
    recent_prices = [_price(current)] * 24
    path = _longest_path(problem, order, current)
    for attempt in range(runs):
        if best_run.makespan <= goal * (1 + 1e-9) and best_run.span_bubble <= 1e-9 * goal:
            break
        moved = _move(problem, order, path, rng)
        if moved is None:
            continue
        result = run(problem, moved)
        if result is None:
            continue
        price = _price(result)
        slot = attempt % len(recent_prices)
        if price <= recent_prices[slot] or price <= _price(current):
            order, current = moved, result
            path = _longest_path(problem, order, current)
            if (current.makespan, current.span_bubble) < (best_run.makespan, best_run.span_bubble):
                best, best_run = order, current
        recent_prices[slot] = _price(current)
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


def _move(problem: Problem, order: Order, path: list[tuple[int, int, int]], rng: random.Random) -> Order | None:
    """The order with one action in another place; None if the action drawn cannot go to the place drawn."""
    rank, first, last = path[rng.randrange(len(path))]
    codes = order[rank]
    draw = rng.random()
    if draw < 0.35:  # let another one of the block's first actions begin it
        source, target = rng.randint(first, min(last, first + 6)), first
    elif draw < 0.7:  # let the block's last action run sooner
        source, target = last, rng.randint(max(first, last - 6), last)
    else:
        source = rng.randint(first, last)
        target = source + rng.choice((-8, -4, -3, -2, -1, 1, 2, 3, 4, 8, 16))
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
