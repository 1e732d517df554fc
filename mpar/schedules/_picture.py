"""Picture: what a pipeline did or will do, as bars on lanes; plain data to draw or to open in a trace viewer."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from mpar.errors import ConfigError
from mpar.schedules._action import Actions
from mpar.schedules._timeline import Costs, Timeline

__all__ = ["BAR_KINDS", "Bar", "Picture", "Row", "from_timeline", "rows", "show_memory", "show_time"]

BAR_KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward of inputs",
    "W": "backward of weights",
    "send": "send",
    "recv": "receive",
    "gather": "gather",
    "reduce": "reduce",
    "update": "update",
    "other": "other",
}

LARGEST = 1e300  # times and sizes above it have no finite number of microseconds

Steps = Sequence[tuple[float, float]]


class Bar(NamedTuple):
    """Work on a lane from `start` to `end`.

    kind: a key of BAR_KINDS. queue: "compute" or the name of a queue beside it. chunk: which of the lane's stages; it changes the
    shade. If the label ends in a number, it is that of a microbatch and written on the bar.
    """

    lane: int
    start: float
    end: float
    label: str
    kind: str
    queue: str = "compute"
    chunk: int = 0

    @property
    def number(self) -> str:
        """The microbatch, or nothing."""
        found = re.search(r"[0-9]+$", self.label)
        return found.group() if found else ""


@dataclass(frozen=True)
class Picture:
    """Bars on named lanes.

    memory: per lane, steps (time, bytes from then on) in order of time; () if unknown.
    unit: "s" means seconds and bytes, "" units of one's own for both. facts: shown as a small table, in this order.
    Raises ConfigError if anything in it cannot be drawn.
    """

    title: str
    lanes: tuple[str, ...]
    bars: tuple[Bar, ...]
    memory: tuple[Steps, ...] = ()
    unit: str = ""
    facts: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what no viewer could show, with all that is wrong."""
        wrong = [] if self.unit in ("", "s") else [f'unit {self.unit!r}: "s" and "" are possible']
        if self.memory and len(self.memory) != len(self.lanes):
            wrong.append(f"memory of {len(self.memory)} lanes, there are {len(self.lanes)}")
        for bar in self.bars:
            if not 0 <= bar.lane < len(self.lanes):
                wrong.append(f"bar {bar.label!r} is on lane {bar.lane} of {len(self.lanes)}")
            if bar.kind not in BAR_KINDS:
                wrong.append(f"bar {bar.label!r} is of kind {bar.kind!r}; kinds are {' '.join(BAR_KINDS)}")
            if not 0 <= bar.start <= bar.end <= LARGEST:
                wrong.append(f"bar {bar.label!r} lasts from {bar.start} to {bar.end}")
            if bar.chunk < 0:
                wrong.append(f"bar {bar.label!r} is of chunk {bar.chunk}")
        for lane, steps in enumerate(self.memory):
            finite = all(0 <= number <= LARGEST for step in steps for number in step)
            if not finite or any(later < earlier for (earlier, _), (later, _) in pairwise(steps)):
                wrong.append(f"memory of lane {lane}: times must ascend, and all numbers be finite and not negative")
        if wrong:
            more = f"\n... and {len(wrong) - 20} more" if len(wrong) > 20 else ""
            raise ConfigError(f"cannot draw {self.title!r}:\n" + "\n".join(wrong[:20]) + more)

    @property
    def end(self) -> float:
        """The last time that there is something to show of."""
        return max((*(bar.end for bar in self.bars), *(step[0] for steps in self.memory for step in steps)), default=0.0)

    @property
    def most_memory(self) -> float:
        """The highest of all memory curves."""
        return max((value for steps in self.memory for _, value in steps), default=0.0)


class Row(NamedTuple):
    """Bars of a lane that follow each other."""

    lane: int
    queue: str
    bars: list[Bar]


def rows(picture: Picture) -> list[Row]:
    """The lines that have to be drawn, lane by lane, compute first. Bars of a queue that overlap get further rows."""
    queues = sorted({(bar.lane, bar.queue != "compute", bar.queue) for bar in picture.bars})
    of_queue: dict[tuple[int, str], list[Row]] = {(lane, queue): [] for lane, _, queue in queues}
    for bar in sorted(picture.bars, key=lambda bar: (bar.start, bar.end)):
        own = of_queue[bar.lane, bar.queue]
        free = next((row for row in own if row.bars[-1].end <= bar.start), None)
        if free is None:
            free = Row(bar.lane, bar.queue, [])
            own.append(free)
        free.bars.append(bar)
    return [row for own in of_queue.values() for row in own]


def from_timeline(table: Actions, timeline: Timeline, title: str, *, costs: Costs | None = None, unit: str = "") -> Picture:
    """The picture of a table of actions and its timeline. With `costs` it has memory curves of activations.

    These rise when a forward begins and fall when a backward ends, as `Timeline.peak_bytes` counts.
    """
    bars: list[Bar] = []
    for rank, own in enumerate(table):
        chunks = {stage: i for i, stage in enumerate(sorted({action.stage for action in own}))}
        times = zip(own, timeline.start[rank], timeline.end[rank], strict=True)
        bars += [Bar(rank, start, end, str(action), action.kind, chunk=chunks[action.stage]) for action, start, end in times]
    memory = _memory(table, timeline, costs) if costs is not None and costs.activation else ()
    facts = {"time": show_time(timeline.makespan, unit), "bubble": _share(timeline.bubble, timeline.makespan, unit)}
    facts["bubble between first and last"] = _share(timeline.span_bubble, timeline.makespan, unit)
    if memory:
        peak = max(timeline.peak_bytes)
        facts["most activations"] = f"{show_memory(peak, unit)} (rank {timeline.peak_bytes.index(peak)})"
    lanes = tuple(f"rank {rank}" for rank in range(len(table)))
    return Picture(title, lanes, tuple(bars), memory, unit, facts)


def show_time(time: float, unit: str) -> str:
    """`3.2 ms`; a plain number in units of one's own."""
    if not unit or not time:
        return f"{time:.6g}"
    scale, name = next(((s, n) for s, n in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")) if time >= s), (1e-9, "ns"))
    return f"{time / scale:.4g} {name}"


def show_memory(size: float, unit: str) -> str:
    """`1.5 GiB`; a plain number in units of one's own."""
    if not unit:
        return f"{size:.6g}"
    power = min(max(int(size).bit_length() - 1, 0) // 10, 4)
    return f"{size / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def _memory(table: Actions, timeline: Timeline, costs: Costs) -> tuple[Steps, ...]:
    """Bytes of activations of every rank after each action that changes them."""
    curves = []
    for own, starts, ends in zip(table, timeline.start, timeline.end, strict=True):
        live, steps = 0, [(0.0, 0.0)]
        for (stage, kind, _), start, end in zip(own, starts, ends, strict=True):
            whole = costs.activation[stage]
            rest = whole if costs.weight_part is None else costs.weight_part[stage]
            live += {"F": whole, "B": -whole, "I": rest - whole, "W": -rest}[kind]
            steps.append((start if kind == "F" else end, live))
        curves.append(tuple(steps))
    return tuple(curves)


def _share(time: float, whole: float, unit: str) -> str:
    return f"{show_time(time, unit)} ({100 * time / whole if whole else 0:.1f} %)"
