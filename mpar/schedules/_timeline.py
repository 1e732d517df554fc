"""Timeline: when every action of a pipeline begins and ends, given its costs; then bubbles and the memory of activations."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from mpar.errors import ConfigError, ProgramError
from mpar.schedules._action import KINDS, Action, Actions

__all__ = ["Costs", "Timeline", "extent", "simulate", "timeline"]


@dataclass(frozen=True)
class Costs:
    """The costs of actions, for each stage. Times are in any unit.

    forward, input, weight: times of F, I and W. backward: time of B; None stands for I + W.
    transfer:   time to send an activation from stage s to s + 1, and its gradient back, if they are on different ranks. Transfers
                from one rank to another do not overlap.
    activation: bytes that a stage holds for a microbatch, from the beginning of its F to the end of its B or W.
    weight_part: how many of these bytes are still held between I and W; None: all.
    """

    forward: Sequence[float]
    input: Sequence[float]
    weight: Sequence[float]
    backward: Sequence[float] | None = None
    transfer: Sequence[float] = ()
    activation: Sequence[int] = ()
    weight_part: Sequence[int] | None = None

    @staticmethod
    def uniform(stages: int, forward: float = 1, input: float = 1, weight: float = 1, transfer: float = 0) -> "Costs":
        """Equal costs for all stages, with one byte of activations each, so that peak bytes count microbatches in flight."""
        return Costs(
            [forward] * stages, [input] * stages, [weight] * stages, transfer=[transfer] * (stages - 1), activation=[1] * stages
        )

    def of(self, action: Action) -> float:
        """The time of an action."""
        stage, kind, _ = action
        if kind == "F":
            return self.forward[stage]
        if kind == "B":
            return self.input[stage] + self.weight[stage] if self.backward is None else self.backward[stage]
        return self.input[stage] if kind == "I" else self.weight[stage]


@dataclass(frozen=True)
class Timeline:
    """start, end: for each rank the times of its actions, in order. busy: for each rank the sum of the durations of its actions.
    peak_bytes: for each rank the peak of its activations, by `Costs.activation`."""

    start: list[list[float]]
    end: list[list[float]]
    busy: list[float]
    peak_bytes: list[int]

    @property
    def makespan(self) -> float:
        """Time from the first beginning to the last end."""
        return max((rank[-1] for rank in self.end if rank), default=0.0)

    @property
    def bubble(self) -> float:
        """The makespan less the busy time of the busiest rank."""
        return self.makespan - max(self.busy, default=0.0)

    @property
    def span_bubble(self) -> float:
        """The longest time that a rank idles between its own first and last action: what zero-bubble papers count."""
        spans = zip(self.start, self.end, self.busy, strict=True)
        return max((end[-1] - start[0] - busy for start, end, busy in spans if start), default=0.0)


def timeline(table: Actions, costs: Costs) -> Timeline:
    """Run every action as early as its rank's order and its operands allow. Linear in the number of actions.

    Raises ProgramError, which says where ranks are stuck, if actions wait for each other; ConfigError if a stage has no costs.
    """
    start, end, _ = simulate(table, costs)
    busy = [sum(e - s for s, e in zip(*times, strict=True)) for times in zip(start, end, strict=True)]
    return Timeline(start, end, busy, [_peak(actions, costs) for actions in table])


Times = list[list[float]]
Bursts = list[tuple[int, int, int]]


def simulate(table: Actions, costs: Costs) -> tuple[Times, Times, Bursts]:
    """(starts, ends, bursts): the times of each rank's actions, and the order in which the simulation ran them.

    A burst is (rank, index of its first action, index after its last). In this order every action comes after everything that it
    needs, even where times are equal.
    """
    stages, count = extent(table)
    _check_costs(stages, costs)
    starts, ends, bursts = _run(table, stages, count, costs)
    stuck = [f"rank {r} at {table[r][len(end)]}" for r, end in enumerate(ends) if len(end) < len(table[r])]
    if stuck:
        raise ProgramError(
            f"these actions wait for each other for ever ({stages} stages, {count} microbatches): {', '.join(stuck)}"
        )
    return starts, ends, bursts


def _run(table: Actions, stages: int, count: int, costs: Costs) -> tuple[Times, Times, Bursts]:
    """The result of `simulate`, up to where the actions get stuck, if they do."""
    duration = {kind: [costs.of(Action(stage, kind, 0)) for stage in range(stages)] for kind in KINDS}
    slow, top = any(costs.transfer), stages - 1
    place: dict[int, int] = {}  # by slot: stage * count + microbatch
    if slow:
        place = {s * count + m: rank for rank, actions in enumerate(table) for s, kind, m in actions if kind == "F"}
    ready: dict[int, float] = {}  # slot * 2: when the result of F is where it is needed, slot * 2 + 1: of I or B
    waiting: dict[int, list[int]] = {}
    free: dict[tuple[int, int], float] = {}  # when the channel between two ranks is free again
    starts: Times = [[] for _ in table]
    ends: Times = [[] for _ in table]
    bursts: Bursts = []
    todo = deque(range(len(table)))
    while todo:
        rank = todo.popleft()
        actions, start, end = table[rank], starts[rank], ends[rank]
        first = len(end)
        now = end[-1] if end else 0.0
        for position in range(first, len(actions)):
            stage, kind, microbatch = actions[position]
            slot = stage * count + microbatch
            if kind == "W":
                made, need = -1, slot * 2 + 1
            elif kind == "F":
                made, taker, need = slot * 2, slot + count, (slot - count) * 2 if stage else -1
            else:
                made, taker, need = slot * 2 + 1, slot - count, slot * 2
                if stage < top and need in ready:
                    need = (slot + count) * 2 + 1
            if need >= 0 and need not in ready:
                waiting.setdefault(need, []).append(rank)
                break
            begin = max(now, ready[need]) if need >= 0 and made >= 0 else now
            now = begin + duration[kind][stage]
            start.append(begin)
            end.append(now)
            if made >= 0:
                ready[made] = now
                if slow and (other := place.get(taker, rank)) != rank:
                    cost = costs.transfer[min(stage, taker // count)]
                    ready[made] = free[rank, other] = max(now, free.get((rank, other), 0.0)) + cost
                if made in waiting:
                    todo.extend(waiting.pop(made))
        bursts.append((rank, first, len(end)))
    return starts, ends, bursts


def extent(table: Actions) -> tuple[int, int]:
    """The numbers of stages and microbatches. Raises ProgramError for negative numbers and unknown kinds."""
    columns = [tuple(zip(*actions, strict=True)) for actions in table if actions]
    if any(min(s) < 0 or min(m) < 0 or not set(kinds).issubset(KINDS) for s, kinds, m in columns):
        wrong = [
            f"{Action(*action)} of rank {rank}"
            for rank, actions in enumerate(table)
            for action in actions
            if action[0] < 0 or action[2] < 0 or action[1] not in KINDS
        ]
        raise ProgramError(f"stages and microbatches count from 0, kinds are {', '.join(KINDS)}; not so: {', '.join(wrong[:8])}")
    return 1 + max((max(s) for s, _, _ in columns), default=-1), 1 + max((max(m) for _, _, m in columns), default=-1)


def _check_costs(stages: int, costs: Costs) -> None:
    given = [len(costs.forward), len(costs.input), len(costs.weight)]
    given += [] if costs.backward is None else [len(costs.backward)]
    given += [len(costs.transfer) + 1] if costs.transfer else []
    if min(given) < stages:
        raise ConfigError(
            f"{stages} stages need costs of each and of {stages - 1} transfers; the costs are of {min(given)} stages"
        )


def _peak(actions: Sequence[Action], costs: Costs) -> int:
    """The peak of a rank's activations. Its actions do not overlap, so their order alone decides."""
    if not costs.activation:
        return 0
    weight_part = costs.activation if costs.weight_part is None else costs.weight_part
    live = peak = 0
    for stage, kind, _ in actions:
        if kind == "F":
            live += costs.activation[stage]
            peak = max(peak, live)
        elif kind == "B":
            live -= costs.activation[stage]
        elif kind == "I":
            live -= costs.activation[stage] - weight_part[stage]
        else:
            live -= weight_part[stage]
    return peak
