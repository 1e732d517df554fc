"""Timeline: when every action of a pipeline begins and ends, given what each costs. Bubbles and activation memory follow."""

from collections.abc import Sequence
from dataclasses import dataclass

from mpar.errors import ProgramError
from mpar.schedules._action import Action, Actions, num_microbatches, num_stages

__all__ = ["Costs", "Timeline", "timeline"]


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

    Raises ProgramError naming what every rank waits for, if none can go on.
    """
    stages, count = num_stages(table), num_microbatches(table)
    place: dict[tuple[int, int], int] = {}
    for rank, own in enumerate(table):
        for stage, kind, microbatch in own:
            if kind == "F":
                place[stage, microbatch] = rank
    done: dict[tuple[int, str, int], float] = {}  # end of F and of I or B (both as "I"), W as "W"
    waiting: dict[tuple[int, str, int], list[int]] = {}
    free: dict[tuple[int, int], float] = {}  # when the channel between two ranks is free again
    arrival: dict[tuple[int, str, int], float] = {}  # of what another rank computed
    start: list[list[float]] = [[] for _ in table]
    end: list[list[float]] = [[] for _ in table]
    now = [0.0] * len(table)
    todo = list(range(len(table)))
    while todo:
        rank = todo.pop()
        own, position = table[rank], len(end[rank])
        while position < len(own):
            action = own[position]
            stage, kind, microbatch = action
            needs = []
            if kind == "F":
                if stage:
                    needs.append((stage - 1, "F", microbatch))
            elif kind == "W":
                needs.append((stage, "I", microbatch))
            else:
                needs.append((stage, "F", microbatch))
                if stage + 1 < stages:
                    needs.append((stage + 1, "I", microbatch))
            missing = next((need for need in needs if need not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            begin = now[rank]
            for need in needs:
                begin = max(begin, arrival.get(need, 0.0) if place.get((need[0], microbatch)) != rank else done[need])
            begin_end = begin + costs.of(action)
            start[rank].append(begin)
            end[rank].append(begin_end)
            now[rank] = begin_end
            position += 1
            made = (stage, kind if kind in "FW" else "I", microbatch)
            done[made] = begin_end
            neighbour = stage + 1 if kind == "F" else stage - 1
            other = place.get((neighbour, microbatch))
            if kind != "W" and other is not None and other != rank:
                cost = costs.transfer[min(stage, neighbour)] if costs.transfer else 0.0
                arrival[made] = free[rank, other] = max(begin_end, free.get((rank, other), 0.0)) + cost
            todo.extend(waiting.pop(made, ()))
    stuck = [f"rank {r} at {table[r][len(ends)]}" for r, ends in enumerate(end) if len(ends) < len(table[r])]
    if stuck:
        raise ProgramError(
            f"these actions wait for each other for ever ({stages} stages, {count} microbatches): {', '.join(stuck)}"
        )
    busy = [sum(e - s for s, e in zip(*both, strict=True)) for both in zip(start, end, strict=True)]
    return Timeline(start, end, busy, [_peak(own, costs) for own in table])


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
