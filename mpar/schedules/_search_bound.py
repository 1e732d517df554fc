"""Lower bounds of the makespan of any order: the longest path, and each rank and channel as a machine with one job at a time.

Paths go along operands, along the microbatches of a stage, and from I and W to the first F that needs their memory (`ahead`).
"""

import heapq
from dataclasses import dataclass

from mpar.schedules._search import B, F, I, Problem, W

__all__ = ["Bounds", "bounds_of"]


@dataclass(frozen=True)
class Bounds:
    """tail: for each code and microbatch, the least time from the end of that action to the end of the pipeline.
    makespan: the least time of any order."""

    tail: list[list[float]]
    makespan: float


def bounds_of(problem: Problem) -> Bounds:
    """Heads and tails of all actions, then per rank and per channel the best preemptive order of its actions by them.

    The one-machine relaxation of job shops (Carlier 1982; Jackson's preemptive schedule). Where B takes less than I and W, their
    times are those of `Problem.lean_input` and `lean_weight`, so that both ways are covered.
    """
    head, tail = _heads(problem), _tails(problem)
    place, count, time = problem.place, problem.count, problem.time
    machines: list[list[tuple[float, float, float]]] = [[] for _ in range(len(problem.rank_stages) + problem.links.num_channels)]
    for stage, rank in enumerate(place):
        durations = ((F, time[4 * stage + F]), (I, problem.lean_input[stage]), (W, problem.lean_weight[stage]))
        for kind, duration in durations:
            code = 4 * stage + kind
            machines[rank] += [(head[code][m], duration, tail[code][m]) for m in range(count)]
        for kind, channel, other in ((F, problem.links.up[stage], stage + 1), (I, problem.links.down[stage], stage - 1)):
            if channel >= 0:
                ends = time[4 * stage + F] if kind == F else problem.lean_input[stage]
                begins = time[4 * other + F] if kind == F else problem.lean_input[other]
                link = problem.links.wire[min(stage, other)]
                machines[len(problem.rank_stages) + channel] += [
                    (head[4 * stage + kind][m] + ends, link, begins + tail[4 * other + kind][m]) for m in range(count)
                ]
    return Bounds(tail, max(map(_one_machine, machines)))


def _one_machine(jobs: list[tuple[float, float, float]]) -> float:
    """Least time to finish jobs (head, duration, tail) on one machine that may interrupt them: longest tail first."""
    jobs = sorted(jobs)
    ready: list[list[float]] = []
    now, best, position = 0.0, 0.0, 0
    while position < len(jobs) or ready:
        if not ready:
            now = max(now, jobs[position][0])
        while position < len(jobs) and jobs[position][0] <= now:
            heapq.heappush(ready, [-jobs[position][2], jobs[position][1]])
            position += 1
        until = jobs[position][0] if position < len(jobs) else float("inf")
        job = ready[0]
        if now + job[1] <= until:
            now += job[1]
            best = max(best, now - job[0])
            heapq.heappop(ready)
        else:
            job[1] -= until - now
            now = until
    return best


def _tails(problem: Problem) -> list[list[float]]:
    """Per code and microbatch: longest path after it, or its way to a rank and all that this rank has to do after it."""
    stages, count, wire = len(problem.place), problem.count, problem.links.wire
    lean, deferred_bytes, forward = problem.lean_input, problem.lean_weight, problem.time[F::4]
    ahead = [problem.ahead(s) for s in range(stages)]
    loads = [_loads_after(problem, s) for s in range(stages)]
    tail = [[0.0] * count for _ in range(4 * stages)]
    for m in reversed(range(count)):
        left, more = count - m, m + 1 < count
        for s in range(stages):
            room, room_weight = ahead[s]
            of_weight = deferred_bytes[s] + tail[4 * s + W][m + 1] if more else 0.0
            if m + room_weight < count:
                of_weight = max(of_weight, forward[s] + tail[4 * s + F][m + room_weight])
            down = wire[s - 1] + lean[s - 1] + tail[4 * s - 4 + I][m] if s else 0.0
            after = max(of_weight, down, lean[s] + tail[4 * s + I][m + 1] if more else 0.0)
            if m + room < count:
                after = max(after, forward[s] + tail[4 * s + F][m + room])
            of_input = max(after, deferred_bytes[s] + of_weight)
            for way, load in loads[s][I]:
                of_input = max(of_input, way + left * load)
            for way, load in loads[s][B]:
                after = max(after, way + left * load)
            tail[4 * s + W][m], tail[4 * s + B][m], tail[4 * s + I][m] = of_weight, after, of_input
        for s in reversed(range(stages)):
            after = lean[s] + tail[4 * s + I][m]
            if more:
                after = max(after, forward[s] + tail[4 * s + F][m + 1])
            if s + 1 < stages:
                after = max(after, wire[s] + forward[s + 1] + tail[4 * s + 4 + F][m])
            for way, load in loads[s][F]:
                after = max(after, way + left * load)
            tail[4 * s + F][m] = after
    return tail


def _heads(problem: Problem) -> list[list[float]]:
    """Per code and microbatch: longest path before it, or all that a rank has to do before it and the way from there."""
    stages, count, wire = len(problem.place), problem.count, problem.links.wire
    lean, deferred_bytes, forward = problem.lean_input, problem.lean_weight, problem.time[F::4]
    ahead = [problem.ahead(s) for s in range(stages)]
    loads = [_loads_before(problem, s) for s in range(stages)]
    head = [[0.0] * count for _ in range(4 * stages)]
    for m in range(count):
        for s in range(stages):
            room, room_weight = ahead[s]
            before = head[4 * s + F][m - 1] + forward[s] if m else 0.0
            if m >= room:
                before = max(before, head[4 * s + I][m - room] + lean[s])
            if m >= room_weight:
                before = max(before, head[4 * s + W][m - room_weight] + deferred_bytes[s])
            if s:
                before = max(before, head[4 * s - 4 + F][m] + forward[s - 1] + wire[s - 1])
            for way, load in loads[s][F]:
                before = max(before, way + (m + 1) * load)
            head[4 * s + F][m] = before
        for s in reversed(range(stages)):
            before = head[4 * s + F][m] + forward[s]
            if m:
                before = max(before, head[4 * s + I][m - 1] + lean[s])
            if s + 1 < stages:
                before = max(before, head[4 * s + 4 + I][m] + lean[s + 1] + wire[s])
            for way, load in loads[s][I]:
                before = max(before, way + (m + 1) * load)
            head[4 * s + I][m] = before
            before = max(before + lean[s], head[4 * s + W][m - 1] + deferred_bytes[s] if m else 0.0)
            for way, load in loads[s][W]:
                before = max(before, way + (m + 1) * load)
            head[4 * s + W][m] = before
    return head


Loads = dict[int, list[tuple[float, float]]]


def _loads_after(problem: Problem, s: int) -> Loads:
    """Per kind of stage s and per rank: (a, b) such that the rank needs at least a + b n after it; n microbatches are not before.

    a is the way to the first action there that depends on it, less the action itself; b what the rank does for a microbatch.
    """
    stages, wire = len(problem.place), problem.links.wire
    lean, deferred_bytes, forward = problem.lean_input, problem.lean_weight, problem.time[F::4]
    loads: Loads = {F: [], I: [], B: []}
    for rank_stages in problem.rank_stages:
        below, above = [o for o in rank_stages if o <= s], [o for o in rank_stages if o >= s]
        if below:
            first = below[-1]
            way = wire[first] + sum(lean[o] + wire[o] for o in range(first + 1, s)) if first < s else 0.0
            load = sum(lean[o] + deferred_bytes[o] for o in below)
            loads[I].append((way if first < s else -lean[s], load))
            loads[B].append((way if first < s else -lean[s] - deferred_bytes[s], load))
        load = sum(lean[o] + deferred_bytes[o] for o in rank_stages) + sum(forward[o] for o in above)
        if above:
            way = sum(wire[o - 1] + (forward[o - 1] if o - 1 > s else 0.0) for o in range(s + 1, above[0] + 1))
            loads[F].append((way if above[0] > s else -forward[s], load))
        else:
            way = sum(wire[o - 1] + forward[o] for o in range(s + 1, stages))
            loads[F].append((way + sum(lean[o] + wire[o - 1] for o in range(rank_stages[-1] + 1, stages)), load))
    return loads


def _loads_before(problem: Problem, s: int) -> Loads:
    """As `_loads_after`, of what the rank has to do before an action of stage s; n microbatches are not after it."""
    stages, wire = len(problem.place), problem.links.wire
    lean, deferred_bytes, forward = problem.lean_input, problem.lean_weight, problem.time[F::4]
    loads: Loads = {F: [], I: [], W: []}
    for rank_stages in problem.rank_stages:
        below, above = [o for o in rank_stages if o <= s], [o for o in rank_stages if o >= s]
        if below:
            last = below[-1]
            way = wire[last] + sum(forward[o] + wire[o] for o in range(last + 1, s)) if last < s else 0.0
            loads[F].append((way if last < s else -forward[s], sum(forward[o] for o in below)))
        load = sum(forward[o] for o in rank_stages) + sum(lean[o] for o in above)
        if above:
            way = sum(wire[o - 1] + (lean[o - 1] if o - 1 > s else 0.0) for o in range(s + 1, above[0] + 1))
            loads[I].append((way if above[0] > s else -lean[s], load))
        else:
            way = sum(wire[o - 1] + forward[o] for o in range(rank_stages[-1] + 1, stages))
            loads[I].append((way + sum(lean[o] + wire[o - 1] for o in range(s + 1, stages)), load))
        if s in rank_stages:
            loads[W].append((-deferred_bytes[s], load + deferred_bytes[s]))
    return loads
