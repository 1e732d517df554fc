"""Timeline: when every action of a pipeline begins and ends, given what each costs. Bubbles and activation memory follow."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from mpar.errors import ConfigError, ProgramError
from mpar.schedules._action import KINDS, Action, Actions

__all__ = ["Costs", "Timeline", "extent", "simulate", "timeline"]


@dataclass(frozen=True)
class Costs:
    """What actions cost, stage by stage; times in any one unit.

    forward, input, weight: time of F, I and W. backward: time of B; None is I + W.
    transfer:   time of an activation from stage s to s + 1, and of its gradient back, if they are on different ranks. Transfers
                from one rank to another follow each other.
    activation: bytes that a stage holds for a microbatch from the beginning of its F to the end of its B or W.
    weight_part: bytes of these that are left after I, until W; None: all.
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
        """The same for all stages; one byte of activations each, so that peak bytes count microbatches in flight."""
        return Costs(
            [forward] * stages, [input] * stages, [weight] * stages, transfer=[transfer] * (stages - 1), activation=[1] * stages
        )

    def of(self, action: Action) -> float:
        """Time of an action."""
        stage, kind, _ = action
        if kind == "F":
            return self.forward[stage]
        if kind == "B":
            return self.input[stage] + self.weight[stage] if self.backward is None else self.backward[stage]
        return self.input[stage] if kind == "I" else self.weight[stage]


@dataclass(frozen=True)
class Timeline:
    """start, end: per rank, of each of its actions in order. peak_bytes: per rank, of activations, by `Costs.activation`."""

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
        """Makespan without the time of the busiest rank."""
        return self.makespan - max(self.busy, default=0.0)

    @property
    def span_bubble(self) -> float:
        """The longest time that a rank idles between its own first and last action: what zero-bubble papers count."""
        spans = zip(self.start, self.end, self.busy, strict=True)
        return max((end[-1] - start[0] - busy for start, end, busy in spans if start), default=0.0)


def timeline(table: Actions, costs: Costs) -> Timeline:
    """Run the actions as early as their order and their operands allow. Linear in their number.

    Raises ProgramError naming what every rank waits for, if none can go on; ConfigError if there are stages without costs.
    """
    start, end, _ = simulate(table, costs)
    busy = [sum(e - s for s, e in zip(*both, strict=True)) for both in zip(start, end, strict=True)]
    return Timeline(start, end, busy, [_peak(own, costs) for own in table])


Times = list[list[float]]
Bursts = list[tuple[int, int, int]]


def simulate(table: Actions, costs: Costs) -> tuple[Times, Times, Bursts]:
    """When each action starts and ends, per rank, and in which order the simulation came by them: (rank, first, past the last).

    In that order an action comes after all that it needs, also where times are equal.
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
    """What `simulate` gives, as far as the actions get."""
    duration = {kind: [costs.of(Action(stage, kind, 0)) for stage in range(stages)] for kind in KINDS}
    slow, top = any(costs.transfer), stages - 1
    place: dict[int, int] = {}  # by slot: stage * count + microbatch
    if slow:
        place = {s * count + m: rank for rank, own in enumerate(table) for s, kind, m in own if kind == "F"}
    ready: dict[int, float] = {}  # slot * 2: when the result of F is where it is needed, slot * 2 + 1: of I or B
    waiting: dict[int, list[int]] = {}
    free: dict[tuple[int, int], float] = {}  # when the channel between two ranks is free again
    starts: Times = [[] for _ in table]
    ends: Times = [[] for _ in table]
    bursts: Bursts = []
    todo = deque(range(len(table)))
    while todo:
        rank = todo.popleft()
        own, start, end = table[rank], starts[rank], ends[rank]
        first = len(end)
        now = end[-1] if end else 0.0
        for position in range(first, len(own)):
            stage, kind, microbatch = own[position]
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
    """Numbers of stages and microbatches. Raises ProgramError for numbers below 0 and unknown kinds."""
    columns = [tuple(zip(*own, strict=True)) for own in table if own]
    if any(min(s) < 0 or min(m) < 0 or not set(kinds).issubset(KINDS) for s, kinds, m in columns):
        wrong = [
            f"{Action(*action)} of rank {rank}"
            for rank, own in enumerate(table)
            for action in own
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


def _peak(own: Sequence[Action], costs: Costs) -> int:
    """Actions of a rank do not overlap, so its memory follows from their order alone."""
    if not costs.activation:
        return 0
    rest = costs.activation if costs.weight_part is None else costs.weight_part
    live = peak = 0
    for stage, kind, _ in own:
        if kind == "F":
            live += costs.activation[stage]
            peak = max(peak, live)
        elif kind == "B":
            live -= costs.activation[stage]
        elif kind == "I":
            live -= costs.activation[stage] - rest[stage]
        else:
            live -= rest[stage]
    return peak
