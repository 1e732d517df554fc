"""The problem that the searches for a pipeline order solve, and what all of them need: to run an order, check it, and read it.

An order is, for each rank, a list of codes `4 * stage + kind`. It does not name microbatches: in each stage every kind takes them
in ascending order, so that the n-th F of a stage is of microbatch n. So every order sums gradients in the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mpar.schedules._action import KINDS, Action, Actions
from mpar.schedules._timeline import Costs

__all__ = [
    "B",
    "F",
    "I",
    "Order",
    "Problem",
    "Run",
    "W",
    "fits",
    "from_table",
    "fused",
    "leaves_room",
    "problem_of",
    "run",
    "to_table",
]

F, B, I, W = range(4)  # noqa: E741 (as in KINDS)
Order = list[list[int]]


class Links(NamedTuple):
    """The channels between stages.

    wire:     for each stage the time to send its activation to the next stage, or to get the gradient back.
    up, down: for each stage the channel of its activation to the next stage, and of its gradient to the previous one; -1 if there
              is no such stage, or if it is on the same rank.
    """

    wire: tuple[float, ...]
    up: tuple[int, ...]
    down: tuple[int, ...]
    num_channels: int


@dataclass(frozen=True)
class Problem:
    """Sizes and costs as flat lists.

    place:       for each stage its rank. rank_stages: for each rank its stages. count: the number of microbatches.
    time:        for each code its time.
    lean_input, lean_weight: for each stage, the least time for I, and the least time that W adds to it, whether an order uses B
                 or I and W.
    activation:  for each stage, bytes held between F and I. deferred_bytes: bytes held between I and W.
    cap:         for each rank the bytes that it has, but no more than all microbatches together hold.
    """

    costs: Costs
    place: tuple[int, ...]
    rank_stages: tuple[tuple[int, ...], ...]
    count: int
    time: tuple[float, ...]
    lean_input: tuple[float, ...]
    lean_weight: tuple[float, ...]
    links: Links
    activation: tuple[int, ...]
    deferred_bytes: tuple[int, ...]
    cap: tuple[float, ...]

    @property
    def size(self) -> int:
        """The number of actions; a B counts as two."""
        return 3 * self.count * len(self.place)

    def ahead(self, stage: int) -> tuple[int, int]:
        """By how many microbatches F of a stage may be ahead of its I, and of its W, if only the cap limits it; at most `count`.

        A microbatch that has done F but not I on a stage holds all of its activations on this stage, and on the earlier stages of
        the rank.
        """
        stages, cap = self.rank_stages[self.place[stage]], self.cap[self.place[stage]]
        held_bytes = sum(self.activation[s] for s in stages if s <= stage)
        activation, deferred_bytes = self.activation[stage], self.deferred_bytes[stage]
        inputs = min(cap // held_bytes, self.count) if held_bytes else self.count
        weights = min((cap - activation) // deferred_bytes + 1, self.count) if deferred_bytes else self.count
        return int(inputs), int(weights)

    def fusing_helps(self, stage: int) -> bool:
        """Whether B takes less than I and W."""
        return self.time[4 * stage + B] < self.time[4 * stage + I] + self.time[4 * stage + W]


class Run(NamedTuple):
    """start, end: for each rank, when its actions begin and end. makespan, span_bubble: see `Timeline`."""

    start: list[list[float]]
    end: list[list[float]]
    makespan: float
    span_bubble: float


def problem_of(costs: Costs, placement: Sequence[int], count: int, cap: Sequence[float]) -> Problem:
    """The problem with these costs, which have been checked before."""
    stages, ranks = len(placement), 1 + max(placement)
    times: list[float] = []
    for stage in range(stages):
        times += [float(costs.of(Action(stage, kind, 0))) for kind in KINDS]
    lean_input = [min(times[4 * s + I], times[4 * s + B]) for s in range(stages)]
    lean_weight = [min(times[4 * s + B], times[4 * s + I] + times[4 * s + W]) - lean_input[s] for s in range(stages)]
    channels: dict[tuple[int, int], int] = {}

    def channel(stage: int, other: int) -> int:
        if not 0 <= other < stages or placement[stage] == placement[other]:
            return -1
        return channels.setdefault((placement[stage], placement[other]), len(channels))

    up = tuple(channel(s, s + 1) for s in range(stages))
    down = tuple(channel(s, s - 1) for s in range(stages))
    wire = tuple(float(costs.transfer[s]) if up[s] >= 0 and costs.transfer else 0.0 for s in range(stages))
    activation = tuple(costs.activation) or (0,) * stages
    deferred_bytes = activation if costs.weight_part is None or not costs.activation else tuple(costs.weight_part)
    rank_stages = tuple(tuple(s for s in range(stages) if placement[s] == rank) for rank in range(ranks))
    all_bytes = [count * sum(activation[s] for s in stages_of) for stages_of in rank_stages]
    return Problem(
        costs, tuple(placement), rank_stages, count, tuple(times), tuple(lean_input), tuple(lean_weight),
        Links(wire, up, down, len(channels)), activation, deferred_bytes, tuple(map(min, cap, all_bytes)),
    )  # fmt: skip


def run(problem: Problem, order: Order) -> Run | None:
    """Run an order of codes, with the times that `timeline` would give; None if the order gets stuck."""
    place, time, (wire, up, down, num_channels) = problem.place, problem.time, problem.links
    stages, ranks = len(place), len(order)
    done_forward, done_input, done_weight = [0] * stages, [0] * stages, [0] * stages
    forward_in, input_in = _arrivals(problem)
    start: list[list[float]] = [[] for _ in order]
    end: list[list[float]] = [[] for _ in order]
    free = [0.0] * num_channels
    waits = [False] * ranks
    todo = list(range(ranks))
    while todo:
        rank = todo.pop()
        codes, starts, ends = order[rank], start[rank], end[rank]
        now = ends[-1] if ends else 0.0
        waits[rank] = False
        for code in codes[len(ends) :] if ends else codes:
            stage, kind = code >> 2, code & 3
            begin = now
            if kind == W:
                if done_weight[stage] >= done_input[stage]:
                    return None
                done_weight[stage] += 1
                other = -1
            else:
                if kind == F:
                    done, arrivals, channel, other = done_forward, forward_in[stage], up[stage], stage + 1
                else:
                    done, arrivals, channel, other = done_input, input_in[stage], down[stage], stage - 1
                index = done[stage]
                if kind != F and (done_forward[stage] <= index or (kind == B and done_weight[stage] != index)):
                    return None
                if len(arrivals) <= index:
                    waits[rank] = True
                    break
                begin, done[stage] = max(begin, arrivals[index]), index + 1
                if kind == B:
                    done_weight[stage] = index + 1
            now = begin + time[code]
            starts.append(begin)
            ends.append(now)
            if 0 <= other < stages:
                arrival = now
                if channel >= 0:
                    arrival = free[channel] = max(now, free[channel]) + wire[min(stage, other)]
                    if waits[place[other]]:
                        waits[place[other]] = False
                        todo.append(place[other])
                (forward_in if kind == F else input_in)[other].append(arrival)
    return _result(problem, order, start, end)


def _arrivals(problem: Problem) -> tuple[list[list[float]], list[list[float]]]:
    """For each stage, when its activations and its gradients arrive, as known before anything runs: the activations of the first
    stage and the gradients of the last are there at time 0."""
    forward_in: list[list[float]] = [[] for _ in problem.place]
    input_in: list[list[float]] = [[] for _ in problem.place]
    forward_in[0], input_in[-1] = [0.0] * problem.count, [0.0] * problem.count
    return forward_in, input_in


def _result(problem: Problem, order: Order, start: list[list[float]], end: list[list[float]]) -> Run | None:
    """The run with these times; None if some action was never run."""
    if any(len(ends) < len(codes) for ends, codes in zip(end, order, strict=True)):
        return None
    spans = [
        ends[-1] - starts[0] - sum([problem.time[code] for code in codes])
        for starts, ends, codes in zip(start, end, order, strict=True)
    ]
    return Run(start, end, max(ends[-1] for ends in end), max(spans))


def fits(problem: Problem, rank: int, codes: Sequence[int]) -> bool:
    """Whether the bytes of a rank's order stay under its cap, at every moment."""
    activation, deferred_bytes, cap = problem.activation, problem.deferred_bytes, problem.cap[rank]
    live = 0
    for code in codes:
        stage, kind = code >> 2, code & 3
        if kind == F:
            live += activation[stage]
            if live > cap:
                return False
        elif kind == B:
            live -= activation[stage]
        elif kind == I:
            live -= activation[stage] - deferred_bytes[stage]
        else:
            live -= deferred_bytes[stage]
    return True


def leaves_room(stages: Sequence[int], stage: int, begun: Sequence[int], sizes: Sequence[int], cap: float, count: int) -> bool:
    """Whether a rank with these `stages` can still finish after one more F of `stage`.

    begun: for each stage of the model, how many F have begun. sizes: for each stage, what one activation takes from the `cap`.

    A microbatch that has begun on an earlier stage of the rank, and has not reached a later stage s, holds its memory until F on
    s has run. So all of these together with one F on s must fit. This is also enough: of all F that wait for memory, take the one
    on the last stage, s. Microbatches that have begun on s finish without more memory and free theirs; what is then still held is
    what is checked here.
    """
    for later in stages:
        if later > stage and begun[later] < count:
            held = sizes[later]
            for earlier in stages:
                if earlier < later:
                    held += (begun[earlier] + (earlier == stage) - begun[later]) * sizes[earlier]
            if held > cap:
                return False
    return True


def from_table(table: Actions) -> Order:
    """The codes of a table of actions. They name no microbatches, so that every stage now takes these in ascending order."""
    return [[4 * stage + KINDS.index(kind) for stage, kind, _ in actions] for actions in table]


def to_table(order: Order) -> list[list[Action]]:
    """Actions of an order, with their microbatches."""
    table = []
    for codes in order:
        seen: dict[tuple[int, int], int] = {}
        actions = []
        for code in codes:
            stage, kind = code >> 2, code & 3
            index = max(seen.get((stage, I), 0), 0) if kind in (B, I) else seen.get((stage, kind), 0)
            for part in (I, W) if kind == B else (kind,):
                seen[stage, part] = index + 1
            actions.append(Action(stage, KINDS[kind], index))
        table.append(actions)
    return table


def fused(problem: Problem, order: Order) -> Order:
    """Replace each I and the W of its microbatch right behind it by one B, unless the pipeline then ends later."""
    current = run(problem, order)
    assert current is not None
    best = current.makespan
    for rank, codes in enumerate(order):
        position = 0
        while position + 1 < len(codes):
            code = codes[position]
            if code & 3 == I and codes[position + 1] == code + 1 and _same_microbatch(codes, position):
                trial = [*order[:rank], [*codes[:position], code - 1, *codes[position + 2 :]], *order[rank + 1 :]]
                result = run(problem, trial)
                if result is not None and result.makespan <= best:
                    order, codes, best = trial, trial[rank], result.makespan
            position += 1
    return order


def _same_microbatch(codes: Sequence[int], position: int) -> bool:
    """Whether the W after the I at `position` is of the same microbatch: no earlier I of this stage still waits for its W."""
    stage = codes[position] >> 2
    before = codes[:position]
    return before.count(4 * stage + I) == before.count(4 * stage + W)
