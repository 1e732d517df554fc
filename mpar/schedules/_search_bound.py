"""Lower bounds of the makespan of any order: the longest path, and each rank and channel as a machine with one job at a time.

A path leads from an action to those that need its result, to the next microbatch of its stage, and from I and W to the first F
that needs the memory they free (`Problem.ahead`).
"""

import heapq
from dataclasses import dataclass

from mpar.schedules._search import B, F, I, Problem, W

__all__ = ["Bounds", "bounds_of"]


@dataclass(frozen=True)
class Bounds:
    """tail: for each code and microbatch, the time that any order needs at least from the end of that action to its own end.
    makespan: the time that any order needs at least."""

    tail: list[list[float]]
    makespan: float


def bounds_of(problem: Problem) -> Bounds:
    """The one-machine relaxation of job shops (Carlier 1982; Jackson's preemptive schedule).

    Each action has a head, the least time before it, and a tail, the least time after it. Each rank and each channel alone then
    does its actions or transfers in the best order, which may interrupt them: no order of the whole pipeline ends earlier. I and
    W count as `Problem.lean_input` and `lean_weight`, so that the bound also holds for orders that use B.
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
                time_before = time[4 * stage + F] if kind == F else problem.lean_input[stage]
                time_after = time[4 * other + F] if kind == F else problem.lean_input[other]
                link = problem.links.wire[min(stage, other)]
                machines[len(problem.rank_stages) + channel] += [
                    (head[4 * stage + kind][m] + time_before, link, time_after + tail[4 * other + kind][m]) for m in range(count)
                ]
    return Bounds(tail, max(map(_one_machine, machines)))


def _one_machine(jobs: list[tuple[float, float, float]]) -> float:
    """The least time in which one machine that may interrupt its jobs, each (head, duration, tail), finishes them. Of the jobs
    that have arrived it runs the one with the longest tail."""
    jobs = sorted(jobs)
    ready: list[list[float]] = []
    now, finish, position = 0.0, 0.0, 0
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
            finish = max(finish, now - job[0])
            heapq.heappop(ready)
        else:
            job[1] -= until - now
            now = until
    return finish


def _tails(problem: Problem) -> list[list[float]]:
    """For each code and microbatch: the longest path after it, or, if longer for some rank, the path to that rank plus all that
    the rank has to do from there on."""
    stages, count, wire = len(problem.place), problem.count, problem.links.wire
    lean_input, lean_weight, forward = problem.lean_input, problem.lean_weight, problem.time[F::4]
    ahead = [problem.ahead(s) for s in range(stages)]
    loads = [_loads_after(problem, s) for s in range(stages)]
    tail = [[0.0] * count for _ in range(4 * stages)]
    for m in reversed(range(count)):
        num_remaining, has_next = count - m, m + 1 < count
        for s in range(stages):
            room, room_weight = ahead[s]
            weight_tail = lean_weight[s] + tail[4 * s + W][m + 1] if has_next else 0.0
            if m + room_weight < count:
                weight_tail = max(weight_tail, forward[s] + tail[4 * s + F][m + room_weight])
            down = wire[s - 1] + lean_input[s - 1] + tail[4 * s - 4 + I][m] if s else 0.0
            after = max(weight_tail, down, lean_input[s] + tail[4 * s + I][m + 1] if has_next else 0.0)
            if m + room < count:
                after = max(after, forward[s] + tail[4 * s + F][m + room])
            input_tail = max(after, lean_weight[s] + weight_tail)
            for way, load in loads[s][I]:
                input_tail = max(input_tail, way + num_remaining * load)
            for way, load in loads[s][B]:
                after = max(after, way + num_remaining * load)
            tail[4 * s + W][m], tail[4 * s + B][m], tail[4 * s + I][m] = weight_tail, after, input_tail
        for s in reversed(range(stages)):
            after = lean_input[s] + tail[4 * s + I][m]
            if has_next:
                after = max(after, forward[s] + tail[4 * s + F][m + 1])
            if s + 1 < stages:
                after = max(after, wire[s] + forward[s + 1] + tail[4 * s + 4 + F][m])
            for way, load in loads[s][F]:
                after = max(after, way + num_remaining * load)
            tail[4 * s + F][m] = after
    return tail


def _heads(problem: Problem) -> list[list[float]]:
    """For each code and microbatch: the longest path before it, or, if longer for some rank, all that the rank has to do before
    it plus the path from that rank."""
    stages, count, wire = len(problem.place), problem.count, problem.links.wire
    lean_input, lean_weight, forward = problem.lean_input, problem.lean_weight, problem.time[F::4]
    ahead = [problem.ahead(s) for s in range(stages)]
    loads = [_loads_before(problem, s) for s in range(stages)]
    head = [[0.0] * count for _ in range(4 * stages)]
    for m in range(count):
        for s in range(stages):
            room, room_weight = ahead[s]
            before = head[4 * s + F][m - 1] + forward[s] if m else 0.0
            if m >= room:
                before = max(before, head[4 * s + I][m - room] + lean_input[s])
            if m >= room_weight:
                before = max(before, head[4 * s + W][m - room_weight] + lean_weight[s])
            if s:
                before = max(before, head[4 * s - 4 + F][m] + forward[s - 1] + wire[s - 1])
            for way, load in loads[s][F]:
                before = max(before, way + (m + 1) * load)
            head[4 * s + F][m] = before
        for s in reversed(range(stages)):
            before = head[4 * s + F][m] + forward[s]
            if m:
                before = max(before, head[4 * s + I][m - 1] + lean_input[s])
            if s + 1 < stages:
                before = max(before, head[4 * s + 4 + I][m] + lean_input[s + 1] + wire[s])
            for way, load in loads[s][I]:
                before = max(before, way + (m + 1) * load)
            head[4 * s + I][m] = before
            before = max(before + lean_input[s], head[4 * s + W][m - 1] + lean_weight[s] if m else 0.0)
            for way, load in loads[s][W]:
                before = max(before, way + (m + 1) * load)
            head[4 * s + W][m] = before
    return head


Loads = dict[int, list[tuple[float, float]]]


def _loads_after(problem: Problem, s: int) -> Loads:
    """By kind of action of stage s: for each rank a pair (way, load). After the action, the rank needs at least way + n * load,
    where n counts the microbatches from that of the action on.

    way:  the time from the end of the action to the first action of the rank that depends on it. If the action is the rank's own,
          this is minus its duration, which `load` counts although it is over.
    load: the time of all that the rank still has to do for one of these microbatches.
    """
    stages, wire = len(problem.place), problem.links.wire
    lean_input, lean_weight, forward = problem.lean_input, problem.lean_weight, problem.time[F::4]
    loads: Loads = {F: [], I: [], B: []}
    for rank_stages in problem.rank_stages:
        below, above = [o for o in rank_stages if o <= s], [o for o in rank_stages if o >= s]
        if below:
            first = below[-1]
            way = wire[first] + sum(lean_input[o] + wire[o] for o in range(first + 1, s)) if first < s else 0.0
            load = sum(lean_input[o] + lean_weight[o] for o in below)
            loads[I].append((way if first < s else -lean_input[s], load))
            loads[B].append((way if first < s else -lean_input[s] - lean_weight[s], load))
        load = sum(lean_input[o] + lean_weight[o] for o in rank_stages) + sum(forward[o] for o in above)
        if above:
            way = sum(wire[o - 1] + (forward[o - 1] if o - 1 > s else 0.0) for o in range(s + 1, above[0] + 1))
            loads[F].append((way if above[0] > s else -forward[s], load))
        else:
            way = sum(wire[o - 1] + forward[o] for o in range(s + 1, stages))
            loads[F].append((way + sum(lean_input[o] + wire[o - 1] for o in range(rank_stages[-1] + 1, stages)), load))
    return loads


def _loads_before(problem: Problem, s: int) -> Loads:
    """Like `_loads_after`, but for what the rank has to do before an action of stage s; n counts the microbatches up to that of
    the action."""
    stages, wire = len(problem.place), problem.links.wire
    lean_input, lean_weight, forward = problem.lean_input, problem.lean_weight, problem.time[F::4]
    loads: Loads = {F: [], I: [], W: []}
    for rank_stages in problem.rank_stages:
        below, above = [o for o in rank_stages if o <= s], [o for o in rank_stages if o >= s]
        if below:
            last = below[-1]
            way = wire[last] + sum(forward[o] + wire[o] for o in range(last + 1, s)) if last < s else 0.0
            loads[F].append((way if last < s else -forward[s], sum(forward[o] for o in below)))
        load = sum(forward[o] for o in rank_stages) + sum(lean_input[o] for o in above)
        if above:
            way = sum(wire[o - 1] + (lean_input[o - 1] if o - 1 > s else 0.0) for o in range(s + 1, above[0] + 1))
            loads[I].append((way if above[0] > s else -lean_input[s], load))
        else:
            way = sum(wire[o - 1] + forward[o] for o in range(rank_stages[-1] + 1, stages))
            loads[I].append((way + sum(lean_input[o] + wire[o - 1] for o in range(s + 1, stages)), load))
        if s in rank_stages:
            loads[W].append((-lean_weight[s], load + lean_weight[s]))
    return loads
