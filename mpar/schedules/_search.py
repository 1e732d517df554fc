"""The problem that searches for a pipeline order solve, and what every search needs: run an order, check it, read it.

An order is, per rank, a list of codes `4 * stage + kind`. Microbatches are not named: in a stage, every kind takes them in
ascending order, so that the n-th F of a stage is that of microbatch n. Any list that runs keeps the order of gradient sums.
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
    """How stages reach each other.

    wire:     per stage, time of its activation to the next stage, or of that one's gradient to it.
    up, down: per stage, the channel of its activation to the next stage, of its gradient to the stage before; -1: the same rank.
    """

    wire: tuple[float, ...]
    up: tuple[int, ...]
    down: tuple[int, ...]
    num_channels: int


@dataclass(frozen=True)
class Problem:
    """Sizes and costs as flat lists.

    time:     per code. `lean_input`, `lean_weight`: per stage, times of I and W that no order can beat, whether it has B or I, W.
    rest:     per stage, bytes between I and W.
    cap:      per rank, bytes; at most what all microbatches hold.
    """

    costs: Costs
    place: tuple[int, ...]
    own: tuple[tuple[int, ...], ...]
    count: int
    time: tuple[float, ...]
    lean_input: tuple[float, ...]
    lean_weight: tuple[float, ...]
    links: Links
    activation: tuple[int, ...]
    rest: tuple[int, ...]
    cap: tuple[float, ...]

    @property
    def size(self) -> int:
        """Actions in all, B as two."""
        return 3 * self.count * len(self.place)

    def ahead(self, stage: int) -> tuple[int, int]:
        """How many microbatches F of a stage may be ahead of its I, and of its W, by the cap alone; `count` if it says nothing.

        What has run F on a stage and not I is held whole by this stage and those before it on the rank.
        """
        own, cap = self.own[self.place[stage]], self.cap[self.place[stage]]
        whole, activation, rest = sum(self.activation[s] for s in own if s <= stage), self.activation[stage], self.rest[stage]
        inputs = min(cap // whole, self.count) if whole else self.count
        weights = min((cap - activation) // rest + 1, self.count) if rest else self.count
        return int(inputs), int(weights)

    def fusing_helps(self, stage: int) -> bool:
        """Whether B takes less than I and W."""
        return self.time[4 * stage + B] < self.time[4 * stage + I] + self.time[4 * stage + W]


class Run(NamedTuple):
    """start, end: per rank, of each action."""

    start: list[list[float]]
    end: list[list[float]]
    makespan: float
    span_bubble: float


def problem_of(costs: Costs, placement: Sequence[int], count: int, cap: Sequence[float]) -> Problem:
    """Flatten costs; everything is checked already."""
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
    rest = activation if costs.weight_part is None or not costs.activation else tuple(costs.weight_part)
    own = tuple(tuple(s for s in range(stages) if placement[s] == rank) for rank in range(ranks))
    all_bytes = [count * sum(activation[s] for s in stages_of) for stages_of in own]
    return Problem(
        costs, tuple(placement), own, count, tuple(times), tuple(lean_input), tuple(lean_weight),
        Links(wire, up, down, len(channels)), activation, rest, tuple(map(min, cap, all_bytes)),
    )  # fmt: skip


def run(problem: Problem, order: Order) -> Run | None:
    """What `timeline` gives, for orders of codes; None if the order is stuck."""
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
        own, starts, ends = order[rank], start[rank], end[rank]
        now = ends[-1] if ends else 0.0
        waits[rank] = False
        for code in own[len(ends) :] if ends else own:
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
    """Per stage, when its activations and its gradients arrive, as far as they need nothing: at the ends of the pipeline."""
    forward_in: list[list[float]] = [[] for _ in problem.place]
    input_in: list[list[float]] = [[] for _ in problem.place]
    forward_in[0], input_in[-1] = [0.0] * problem.count, [0.0] * problem.count
    return forward_in, input_in


def _result(problem: Problem, order: Order, start: list[list[float]], end: list[list[float]]) -> Run | None:
    """The run that these times are of; None if some action has none."""
    if any(len(ends) < len(own) for ends, own in zip(end, order, strict=True)):
        return None
    spans = [
        ends[-1] - starts[0] - sum([problem.time[code] for code in own])
        for starts, ends, own in zip(start, end, order, strict=True)
    ]
    return Run(start, end, max(ends[-1] for ends in end), max(spans))


def fits(problem: Problem, rank: int, own: Sequence[int]) -> bool:
    """Whether the bytes of a rank's order stay under its cap, at every moment."""
    activation, rest, cap = problem.activation, problem.rest, problem.cap[rank]
    live = 0
    for code in own:
        stage, kind = code >> 2, code & 3
        if kind == F:
            live += activation[stage]
            if live > cap:
                return False
        elif kind == B:
            live -= activation[stage]
        elif kind == I:
            live -= activation[stage] - rest[stage]
        else:
            live -= rest[stage]
    return True


def leaves_room(own: Sequence[int], stage: int, begun: Sequence[int], sizes: Sequence[int], cap: float, count: int) -> bool:
    """Whether a rank, after one more F of `stage`, can go on to the end; `begun`: per stage of the model, F begun so far.

    What is begun on earlier stages of the rank, of microbatches that have not reached a later stage s, cannot go before F on s
    has run: together with one F on s it must fit. That is also enough: of all F that wait for memory take the one on the last
    stage; the microbatches before it need no more memory to end, and what is left then is what this asks about.
    """
    for later in own:
        if later > stage and begun[later] < count:
            held = sizes[later]
            for earlier in own:
                if earlier < later:
                    held += (begun[earlier] + (earlier == stage) - begun[later]) * sizes[earlier]
            if held > cap:
                return False
    return True


def from_table(table: Actions) -> Order:
    """Codes of a table of actions: microbatches are renumbered to ascend."""
    return [[4 * stage + KINDS.index(kind) for stage, kind, _ in own] for own in table]


def to_table(order: Order) -> list[list[Action]]:
    """Actions of an order, with their microbatches."""
    table = []
    for own in order:
        seen: dict[tuple[int, int], int] = {}
        actions = []
        for code in own:
            stage, kind = code >> 2, code & 3
            index = max(seen.get((stage, I), 0), 0) if kind in (B, I) else seen.get((stage, kind), 0)
            for part in (I, W) if kind == B else (kind,):
                seen[stage, part] = index + 1
            actions.append(Action(stage, KINDS[kind], index))
        table.append(actions)
    return table


def fused(problem: Problem, order: Order) -> Order:
    """Turn I and W that follow each other into B wherever the end of the pipeline does not come later by it."""
    now = run(problem, order)
    assert now is not None
    best = now.makespan
    for rank, own in enumerate(order):
        position = 0
        while position + 1 < len(own):
            code = own[position]
            if code & 3 == I and own[position + 1] == code + 1 and _same_microbatch(own, position):
                trial = [*order[:rank], [*own[:position], code - 1, *own[position + 2 :]], *order[rank + 1 :]]
                result = run(problem, trial)
                if result is not None and result.makespan <= best:
                    order, own, best = trial, trial[rank], result.makespan
            position += 1
    return order


def _same_microbatch(own: Sequence[int], position: int) -> bool:
    """Whether W after I at `position` is of the same microbatch: nothing of the stage is left between its I and W."""
    stage = own[position] >> 2
    before = own[:position]
    return before.count(4 * stage + I) == before.count(4 * stage + W)
