"""Picture: what a pipeline did or will do, as bars on lanes. Plain data, to be drawn or opened in a trace viewer."""

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

LARGEST = 1e300  # the largest time or size: above it, the number of microseconds may be infinite

Curve = Sequence[tuple[float, float]]


class Bar(NamedTuple):
    """Work on a lane from `start` to `end`.

    kind: a key of BAR_KINDS. queue: "compute", or the name of another queue. chunk: the number of the stage among those of the
    lane, which changes the shade. If the label ends in a number, this is the microbatch, and is written on the bar.
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
        """The microbatch at the end of the label, or an empty text."""
        match = re.search(r"[0-9]+$", self.label)
        return match.group() if match else ""


@dataclass(frozen=True)
class Picture:
    """Bars on named lanes.

    memory: for each lane a curve of (time, bytes from then on), in order of time; () if unknown.
    unit: "s" stands for seconds and bytes, "" for arbitrary units. facts: shown as a small table, in this order.
    Raises ConfigError if anything in the picture cannot be drawn.
    """

    title: str
    lanes: tuple[str, ...]
    bars: tuple[Bar, ...]
    memory: tuple[Curve, ...] = ()
    unit: str = ""
    facts: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ConfigError, which lists everything that no viewer could show."""
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
        """The time at which the last bar ends, or the last change of memory, whichever is later."""
        return max((*(bar.end for bar in self.bars), *(step[0] for steps in self.memory for step in steps)), default=0.0)

    @property
    def peak_memory(self) -> float:
        """The highest of all memory curves."""
        return max((value for steps in self.memory for _, value in steps), default=0.0)


class Row(NamedTuple):
    """Bars of one lane and queue that do not overlap."""

    lane: int
    queue: str
    bars: list[Bar]


def rows(picture: Picture) -> list[Row]:
    """The rows to draw, lane by lane, those of compute first. Bars of a queue that overlap go into separate rows."""
    queues = sorted({(bar.lane, bar.queue != "compute", bar.queue) for bar in picture.bars})
    of_queue: dict[tuple[int, str], list[Row]] = {(lane, queue): [] for lane, _, queue in queues}
    for bar in sorted(picture.bars, key=lambda bar: (bar.start, bar.end)):
        queue_rows = of_queue[bar.lane, bar.queue]
        free = next((row for row in queue_rows if row.bars[-1].end <= bar.start), None)
        if free is None:
            free = Row(bar.lane, bar.queue, [])
            queue_rows.append(free)
        free.bars.append(bar)
    return [row for queue_rows in of_queue.values() for row in queue_rows]


def from_timeline(table: Actions, timeline: Timeline, title: str, *, costs: Costs | None = None, unit: str = "") -> Picture:
    """The picture of a table of actions and its timeline. With `costs` it has curves of the memory of activations.

    A curve rises when a forward begins and falls when a backward ends, as `Timeline.peak_bytes` counts.
    """
    bars: list[Bar] = []
    for rank, actions in enumerate(table):
        chunks = {stage: i for i, stage in enumerate(sorted({action.stage for action in actions}))}
        times = zip(actions, timeline.start[rank], timeline.end[rank], strict=True)
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
    """A time in words: `3.2 ms`, or a plain number if there is no unit."""
    if not unit or not time:
        return f"{time:.6g}"
    scale, name = next(((s, n) for s, n in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")) if time >= s), (1e-9, "ns"))
    return f"{time / scale:.4g} {name}"


def show_memory(size: float, unit: str) -> str:
    """A size in words: `1.5 GiB`, or a plain number if there is no unit."""
    if not unit:
        return f"{size:.6g}"
    power = min(max(int(size).bit_length() - 1, 0) // 10, 4)
    return f"{size / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def _memory(table: Actions, timeline: Timeline, costs: Costs) -> tuple[Curve, ...]:
    """For every rank the bytes of its activations, after each action that changes them."""
    curves = []
    for actions, starts, ends in zip(table, timeline.start, timeline.end, strict=True):
        live, steps = 0, [(0.0, 0.0)]
        for (stage, kind, _), start, end in zip(actions, starts, ends, strict=True):
            activation = costs.activation[stage]
            weight_part = activation if costs.weight_part is None else costs.weight_part[stage]
            live += {"F": activation, "B": -activation, "I": weight_part - activation, "W": -weight_part}[kind]
            steps.append((start if kind == "F" else end, live))
        curves.append(tuple(steps))
    return tuple(curves)


def _share(time: float, total: float, unit: str) -> str:
    return f"{show_time(time, unit)} ({100 * time / total if total else 0:.1f} %)"
