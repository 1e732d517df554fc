"""List scheduling: a rank that becomes idle takes, of the actions that are ready, the one that a rule prefers.

A rule decides the things in which the named schedules differ: how many microbatches a rank may have in flight, whether forward or
backward goes first, which chunk goes first, how long weight gradients wait (Qi et al. 2023, arXiv:2401.10241, section 3.1).
"""

import heapq
from dataclasses import dataclass
from typing import NamedTuple

from mpar.schedules._search import B, F, I, Order, Problem, W, leaves_room

__all__ = ["Rule", "greedy"]


@dataclass(frozen=True)
class Rule:
    """What a rank prefers.

    limit: for each rank, how many chunks may be in flight, which means that their F has begun and their I has not.
    delay: for each rank, how many W may wait; if more do, one of them goes first.
    backward_first: whether I goes before F when both are ready.
    forward, backward: which stage goes first if several are ready for F, or for I: "deep" the last, "shallow" the first, "old"
        the one with the lowest microbatch, "group" the first stage of those in the earliest group of `group` microbatches.
    patience: if only W is ready and cap and limit hold back no F, W begins only if the next arrival is at least `patience` times
        the duration of W away.
    fuse: on which stages B takes the place of I, if it is shorter than I and W: "none", "first" (stage 0) or "all".
    """

    limit: tuple[int, ...]
    delay: tuple[int, ...]
    backward_first: bool = True
    forward: str = "deep"
    backward: str = "deep"
    patience: float = 1.0
    fuse: str = "none"
    group: int = 1


def greedy(problem: Problem, rule: Rule) -> Order:
    """The order that the rule gives. It never gets stuck: see `leaves_room`.

    In the order of time, each rank that is free chooses an action; if it has none, it chooses again when something arrives.
    """
    stages, last = len(problem.place), len(problem.place) - 1
    place, time, (wire, up, down, num_channels) = problem.place, problem.time, problem.links
    arrivals: list[list[float]] = [[] for _ in range(2 * stages)]  # stage: of activations; stages + stage: of gradients
    arrivals[0] = [0.0] * problem.count
    arrivals[stages + last] = [0.0] * problem.count
    free = [0.0] * num_channels
    ranks = [_Rank(problem, rule, rank, arrivals) for rank in range(len(problem.rank_stages))]
    busy_until = [0.0] * len(ranks)
    events: list[tuple[float, int]] = [(0.0, rank) for rank in range(len(ranks))]
    while events:
        now, rank = heapq.heappop(events)
        if now < busy_until[rank]:
            continue
        while events and events[0] == (now, rank):
            heapq.heappop(events)
        code = ranks[rank].next_code(now)
        if code < 0:
            continue
        stage, kind = code >> 2, code & 3
        end = now + time[code]
        busy_until[rank] = end
        heapq.heappush(events, (end, rank))
        other = stage + 1 if kind == F else stage - 1
        if kind == W or not 0 <= other < stages:
            continue
        channel = up[stage] if kind == F else down[stage]
        if channel >= 0:
            end = free[channel] = max(end, free[channel]) + wire[min(stage, other)]
            heapq.heappush(events, (max(end, busy_until[place[other]]), place[other]))
        arrivals[other if kind == F else stages + other].append(end)
    return [rank.order for rank in ranks]


class _Limits(NamedTuple):
    """The limits of a rank: its stages, its bytes, how many chunks may be in flight, how many weight gradients may wait."""

    stages: tuple[int, ...]
    cap: float
    limit: int
    delay: int


class _Rank:
    """Counts the actions that one rank has begun, and chooses its next one."""

    def __init__(self, problem: Problem, rule: Rule, rank: int, arrivals: list[list[float]]) -> None:
        self.problem, self.rule, self.arrivals = problem, rule, arrivals
        rank_stages = problem.rank_stages[rank]
        self.limits = _Limits(rank_stages, problem.cap[rank], max(rule.limit[rank], len(rank_stages)), rule.delay[rank])
        stages = len(problem.place)
        self.forwards, self.inputs, self.weights = [0] * stages, [0] * stages, [0] * stages  # begun
        self.live, self.in_flight, self.pending = 0, 0, 0  # bytes; chunks in flight; W that wait
        self.order: list[int] = []

    def may_begin(self, stage: int) -> bool:
        """Whether F of a stage stays within cap and limit, and leaves room for the later stages of this rank."""
        stages, cap, limit, _ = self.limits
        activation, count = self.problem.activation, self.problem.count
        if self.live + activation[stage] > cap or self.in_flight + 1 > limit:
            return False
        if len(stages) == 1:
            return True
        ones = [1] * len(activation)
        return leaves_room(stages, stage, self.forwards, activation, cap, count) and leaves_room(
            stages, stage, self.forwards, ones, limit, count
        )

    def next_code(self, now: float) -> int:
        """The code of the action that begins now, which is counted as begun; -1: none."""
        stages, count, rule = len(self.problem.place), self.problem.count, self.rule
        forwards: list[tuple[float, int]] = []
        backwards: list[tuple[float, int]] = []
        blocked, soon = False, float("inf")
        for s in self.limits.stages:
            begun, inputs = self.forwards[s], self.inputs[s]
            if inputs < begun and inputs < len(self.arrivals[stages + s]):
                arrival = self.arrivals[stages + s][inputs]
                if arrival <= now:
                    backwards.append((self._preference(rule.backward, s, inputs), s))
                else:
                    soon = min(soon, arrival)
            if begun < count and begun < len(self.arrivals[s]):
                arrival = self.arrivals[s][begun]
                if not self.may_begin(s):
                    blocked = True
                elif arrival <= now:
                    forwards.append((self._preference(rule.forward, s, begun), s))
                else:
                    soon = min(soon, arrival)
        if self.pending > self.limits.delay or (self.pending and not forwards and not backwards):
            weight = self._oldest_weight()
            if forwards or backwards or blocked or soon - now >= rule.patience * self.problem.time[4 * weight + W]:
                return self._begin(weight, W)
            return -1
        if backwards and (rule.backward_first or not forwards):
            return self._begin(min(backwards)[1], I)
        if forwards:
            return self._begin(min(forwards)[1], F)
        return -1

    def _preference(self, rule: str, stage: int, microbatch: int) -> float:
        stages = len(self.problem.place)
        if rule == "deep":
            return -stage
        if rule == "shallow":
            return stage
        if rule == "old":
            return microbatch * stages - stage
        return microbatch // self.rule.group * stages + stage

    def _oldest_weight(self) -> int:
        """The stage with the lowest microbatch whose W waits; of these the deepest."""
        return min((self.weights[s], -s, s) for s in self.limits.stages if self.weights[s] < self.inputs[s])[2]

    def _begin(self, stage: int, kind: int) -> int:
        problem = self.problem
        activation, deferred_bytes = problem.activation[stage], problem.deferred_bytes[stage]
        if kind == F:
            self.forwards[stage] += 1
            self.live += activation
            self.in_flight += 1
        elif kind == W:
            self.weights[stage] += 1
            self.live -= deferred_bytes
            self.pending -= 1
        else:
            self.inputs[stage] += 1
            self.in_flight -= 1
            self.live -= activation - deferred_bytes
            self.pending += 1
            chosen = self.rule.fuse == "all" or (self.rule.fuse == "first" and stage == 0)
            if chosen and self.inputs[stage] == self.weights[stage] + 1 and problem.fusing_helps(stage):
                kind = B
                self.weights[stage] += 1
                self.live -= deferred_bytes
                self.pending -= 1
        self.order.append(4 * stage + kind)
        return self.order[-1]
