"""Exact search for small pipelines: tries all orders, except those that cannot be better than another one.

A state is the beginning of an order: which actions have begun, the time T at which the last of them began, and all times on which
later actions depend: when ranks and channels are free and when operands arrive. Each new action begins at T or later, if need be
after waiting for T: every order can be built in this way. If two states have begun the same actions and no time of the first is
later than that of the second, the second is dropped, because whatever follows it can also follow the first. A state is also
dropped if its lower bound reaches the best makespan known. Layer n holds the states with n actions begun; a B counts as two.
"""

from collections.abc import Iterator
from typing import NamedTuple

from mpar.schedules._search import B, F, I, Order, Problem, W, leaves_room
from mpar.schedules._search_bound import Bounds

__all__ = ["Outcome", "exact"]


class Outcome(NamedTuple):
    """order: an order that is better than the known one, or None. proven: whether no better one exists. nodes: states opened."""

    order: Order | None
    proven: bool
    nodes: int


class _State(NamedTuple):
    """time: when the last action began. bound: a time before which no order that goes on from here ends. code: the last action.
    before: the state before it."""

    begun: tuple[int, ...]  # for each stage, how many F, I and W
    live: tuple[int, ...]  # bytes held by each rank
    work: tuple[float, ...]  # the least time of what each rank still has to do
    free: tuple[float, ...]  # when each rank, and then each channel, is free
    arrivals: tuple[tuple[float, ...], ...]  # when waiting activations arrive at each stage, then when waiting gradients do
    time: float
    bound: float
    code: int
    before: "_State | None"


def exact(problem: Problem, bounds: Bounds, known: float, *, nodes: int, width: int | None = None) -> Outcome:
    """Look for an order that ends before `known`; give up after opening `nodes` states.

    width: keep at most so many states of each layer: a beam search, which proves nothing once it has dropped a state.
    """
    epsilon = 1e-9 * max(known, 1e-30)
    layers: list[dict[tuple[int, ...], list[_State]]] = [{} for _ in range(problem.size + 3)]
    first = _first(problem)
    layers[0][first.begun] = [first]
    best: _State | None = None
    opened, dropped = 0, False
    for size in range(problem.size):
        states = [state for states in layers[size].values() for state in states]
        layers[size].clear()
        if width is not None and len(states) > width:
            states.sort(key=lambda state: (state.bound, sum(state.free)))
            states, dropped = states[:width], True
        for state in states:
            if state.bound >= known - epsilon:
                continue
            if opened >= nodes:
                return Outcome(_order(problem, best), False, opened)
            opened += 1
            for child in _children(problem, bounds, state, known - epsilon):
                num_actions = 2 if child.code & 3 == B else 1
                if size + num_actions == problem.size:
                    known, best = child.bound, child
                else:
                    _keep(layers[size + num_actions], child)
    return Outcome(_order(problem, best), not dropped, opened)


def _keep(layer: dict[tuple[int, ...], list[_State]], child: _State) -> None:
    """Add a state to its layer unless one that is as good is there already; drop the states that the new one is as good as."""
    others = layer.setdefault(child.begun, [])
    times = _times(child)
    kept = []
    for other in others:
        theirs = _times(other)
        if all(map(float.__le__, theirs, times)):
            return
        if not all(map(float.__le__, times, theirs)):
            kept.append(other)
    kept.append(child)
    layer[child.begun] = kept


def _times(state: _State) -> list[float]:
    return [state.time, *state.free, *(time for waiting in state.arrivals for time in waiting)]


def _first(problem: Problem) -> _State:
    stages, count = len(problem.place), problem.count
    work = tuple(
        count * sum(problem.time[4 * s + F] + problem.lean_input[s] + problem.lean_weight[s] for s in stages_of)
        for stages_of in problem.rank_stages
    )
    free = (0.0,) * (len(problem.rank_stages) + problem.links.num_channels)
    arrivals: list[tuple[float, ...]] = [()] * (2 * stages)
    arrivals[0] = (0.0,) * count
    arrivals[2 * stages - 1] = (0.0,) * count
    return _State((0,) * (3 * stages), (0,) * len(problem.rank_stages), work, free, tuple(arrivals), 0.0, 0.0, -1, None)


def _children(problem: Problem, bounds: Bounds, state: _State, limit: float) -> Iterator[_State]:
    """The states after one more action, of which each has a bound below `limit`."""
    stages, begun = len(problem.place), state.begun
    for stage, rank in enumerate(problem.place):
        forwards, inputs, weights = begun[3 * stage : 3 * stage + 3]
        if forwards < problem.count and state.arrivals[stage] and _has_room(problem, state, stage, rank):
            yield from _child(problem, bounds, state, stage, F, state.arrivals[stage][0], limit)
        if inputs < forwards and state.arrivals[stages + stage]:
            yield from _child(problem, bounds, state, stage, I, state.arrivals[stages + stage][0], limit)
            if weights == inputs and problem.fusing_helps(stage):
                yield from _child(problem, bounds, state, stage, B, state.arrivals[stages + stage][0], limit)
        if weights < inputs:
            yield from _child(problem, bounds, state, stage, W, 0.0, limit)


def _has_room(problem: Problem, state: _State, stage: int, rank: int) -> bool:
    if state.live[rank] + problem.activation[stage] > problem.cap[rank]:
        return False
    return leaves_room(problem.rank_stages[rank], stage, state.begun[::3], problem.activation, problem.cap[rank], problem.count)


def _child(
    problem: Problem, bounds: Bounds, state: _State, stage: int, kind: int, arrival: float, limit: float
) -> Iterator[_State]:
    """The state after one more action; none if its bound is not below the limit."""
    code, rank, stages, ranks = 4 * stage + kind, problem.place[stage], len(problem.place), len(problem.rank_stages)
    begin = max(state.free[rank], arrival, state.time)
    end = begin + problem.time[code]
    microbatch = state.begun[3 * stage + (0, 1, 1, 2)[kind]]
    bound = max(state.bound, end + bounds.tail[code][microbatch])
    if bound >= limit:
        return
    work = list(state.work)
    work[rank] -= (
        problem.time[code] if kind == F else
        problem.lean_input[stage] + problem.lean_weight[stage] if kind == B else
        problem.lean_input[stage] if kind == I else problem.lean_weight[stage]
    )  # fmt: skip
    free = list(state.free)
    free[rank] = end
    arrivals = list(state.arrivals)
    if kind != W:
        source = stage if kind == F else stages + stage
        arrivals[source] = arrivals[source][1:]
        other = stage + 1 if kind == F else stage - 1
        if 0 <= other < stages:
            channel = problem.links.up[stage] if kind == F else problem.links.down[stage]
            reached = end
            if channel >= 0:
                reached = free[ranks + channel] = max(end, free[ranks + channel]) + problem.links.wire[min(stage, other)]
            target = other if kind == F else stages + other
            arrivals[target] = (*arrivals[target], reached)
    for index, free_at in enumerate(free):
        if free_at < begin:
            free[index] = begin  # nothing later begins before `begin`, so that states with earlier times are equal to this one
        if index < ranks:
            bound = max(bound, free[index] + work[index])
    if bound >= limit:
        return
    begun, live = list(state.begun), list(state.live)
    activation, deferred_bytes = problem.activation[stage], problem.deferred_bytes[stage]
    for part in ((0,), (1, 2), (1,), (2,))[kind]:
        begun[3 * stage + part] += 1
    live[rank] += (activation, -activation, deferred_bytes - activation, -deferred_bytes)[kind]
    waiting = tuple(tuple(max(time, begin) for time in times) for times in arrivals)
    yield _State(tuple(begun), tuple(live), tuple(work), tuple(free), waiting, begin, bound, code, state)


def _order(problem: Problem, state: _State | None) -> Order | None:
    """The order that led to a state."""
    if state is None:
        return None
    order: Order = [[] for _ in problem.rank_stages]
    while state.before is not None:
        order[problem.place[state.code >> 2]].append(state.code)
        state = state.before
    for codes in order:
        codes.reverse()
    return order
