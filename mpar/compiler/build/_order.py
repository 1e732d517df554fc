"""Order: a pass over the finished parts of a program that hides communication and copies behind computation.

It needs to know how long everything takes and how much memory there is, so it does nothing without a hardware profile, or on
hardware that does one thing at a time. Two things keep queues from running at the same time in the order that is written.

A gather stands in front of the segment that reads it: it moves up in front of the segment before, if there is memory for both.

Memory that a reduction or a copy to the host reads is freed behind it. Whoever allocated it, computation, may use it again at
once, and so would have to wait: it is freed later, where computation is predicted to arrive after the reduction has ended. Where
memory would not suffice until then, it is freed as late as it does.
"""

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mpar.forecast import StepTimes, memory_timeline, predicted_times
from mpar.hardware import Hardware
from mpar.ir import HOME, Instruction, Part, ProgramData, Value, queues_on_streams

__all__ = ["Ordered", "hide_communication", "hoist_gathers", "peak_bytes", "usable_bytes"]

_USABLE = 0.9  # of a device's memory: the rest is for what frameworks and communication libraries hold, and for fragments


@dataclass(frozen=True)
class Ordered:
    """What is predicted of an ordered program: the seconds of a step, and the most bytes that any rank needs."""

    makespan: float
    peak_bytes: int


def hide_communication(program: ProgramData, hardware: Hardware | None, prefetch_bytes: int | None) -> Ordered | None:
    """Reorder the parts of `program` in place. It computes the same; by prediction a step takes no longer, and memory suffices if
    it did before.

    prefetch_bytes: gathers of at most so many bytes move up, whatever memory there is; None: those that fit.
    Returns None where there is nothing to hide.
    """
    if prefetch_bytes is not None:
        for part in program.parts:
            part.instructions = hoist_gathers(part.instructions, program.values, [prefetch_bytes] * len(part.instructions))
    if hardware is None or not hardware.overlaps or all(_is_one_queue(program, part) for part in program.parts):
        return None
    before, makespan = [list(part.instructions) for part in program.parts], predicted_times(program, hardware).makespan
    levels = [_levels(program, position) for position in range(len(program.parts))]
    limits = [max(usable_bytes(hardware), *own) for own in levels]
    for part, own, limit in zip(program.parts, levels, limits, strict=True):
        if prefetch_bytes is None:
            part.instructions = hoist_gathers(part.instructions, program.values, [limit - level for level in own])
        part.instructions = _norms_as_ready(part.instructions)
    _free_later(program, hardware, limits)
    peaks = [max(_levels(program, position)) for position in range(len(program.parts))]
    if all(peak <= limit for peak, limit in zip(peaks, limits, strict=True)):
        found = predicted_times(program, hardware).makespan
        if found <= makespan:
            return Ordered(found, max(peaks))
    for part, instructions in zip(program.parts, before, strict=True):
        part.instructions = instructions
    return Ordered(makespan, max(map(max, levels)))


def peak_bytes(program: ProgramData) -> int:
    """The most bytes that any rank needs at any time."""
    return max(max(_levels(program, position)) for position in range(len(program.parts)))


def usable_bytes(hardware: Hardware) -> float:
    """The memory of a device, but for some that programs do not know of."""
    return _USABLE * hardware.memory_bytes


def _is_one_queue(program: ProgramData, part: Part) -> bool:
    return all(queue == HOME for queue in queues_on_streams(part.instructions, program.kinds))


def _levels(program: ProgramData, position: int) -> list[int]:
    """For each line of a part, the most bytes while it runs."""
    return [peak for peak, _ in memory_timeline(program, position)]


def hoist_gathers(instructions: Sequence[Instruction], values: Sequence[Value], room: Sequence[float]) -> list[Instruction]:
    """Move each gather up, in front of the first instruction that reads the previous gather, if there is room for what it makes
    on all lines that it passes. Gathers that one instruction reads move together.

    before:  w0 = gather 0; x1 = forward 0 (w0); w1 = gather 1; x2 = forward 1 (w1)
    after:   w0 = gather 0; w1 = gather 1; x1 = forward 0 (w0); x2 = forward 1 (w1)

    So it runs while the segment before its own computes. Gathers keep their order, so ranks meet in the same collectives in the
    same order. Only the memory grows, by what one gather makes.
    """
    left = list(room)
    out: list[tuple[int, Instruction]] = []  # with the line that each had
    barrier = 0  # the place of the first instruction that reads a previous gather, which moved up too; 0 while there is none
    previous: set[int] = set()
    for line, instruction in enumerate(instructions):
        if previous and previous & set(instruction.inputs):
            barrier, previous = len(out), set()
        if instruction.op != "gather":
            out.append((line, instruction))
            continue
        made = {value for _, earlier in out[barrier:] for value in earlier.outputs}
        size = sum(values[v].bytes for v in instruction.outputs)
        passed = [earlier for earlier, _ in out[barrier:]]
        hoists = bool(barrier) and all(size <= left[earlier] for earlier in passed) and not made & set(instruction.inputs)
        for earlier in passed if hoists else ():
            left[earlier] -= size
        out.insert(barrier if hoists else len(out), (line, instruction))
        previous.update(instruction.outputs)
        barrier = barrier + 1 if hoists else 0
    return [instruction for _, instruction in out]


def _norms_as_ready(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Take the norms of gradients in the order in which the gradients are ready: the last are still being reduced.

    The norms of two units read different values, so that either may free what it reads; if they do not, they stay as they are.
    """
    maker = {value: line for line, instruction in enumerate(instructions) for value in instruction.outputs}
    lines = {line for line, instruction in enumerate(instructions) if instruction.op == "norm"}
    of_units = [line for line in sorted(lines) if not any(maker.get(v) in lines for v in instructions[line].inputs)]
    read = [v for line in of_units for v in set(instructions[line].inputs)]
    if len(read) > len(set(read)):
        return list(instructions)
    ready = sorted(of_units, key=lambda line: max((maker.get(v, -1) for v in instructions[line].inputs), default=-1))
    out = list(instructions)
    for place, line in zip(of_units, ready, strict=True):
        out[place] = instructions[line]
    return out


@dataclass(frozen=True)
class _Free:
    """Values that are freed at `line`, where computation would have to wait until the lines `users` of other queues end."""

    line: int
    values: tuple[int, ...]
    bytes: int
    users: tuple[int, ...]


def _free_later(program: ProgramData, hardware: Hardware, limits: Sequence[float]) -> None:
    """Move frees for which computation would wait to where it need not, within the limit of each position in bytes."""
    waiting = [_waiting_frees(program, part) for part in program.parts]
    if not any(waiting):
        return
    for part, frees in zip(program.parts, waiting, strict=True):
        part.instructions = _without(part.instructions, frees)
    times = predicted_times(program, hardware)  # as if memory were endless
    for position, (part, frees) in enumerate(zip(program.parts, waiting, strict=True)):
        room = [limits[position] - level for level in _levels(program, position)]
        places = _within(room, frees, _places(part, frees, times, position))
        part.instructions = _with(part.instructions, frees, places)


def _waiting_frees(program: ProgramData, part: Part) -> list[_Free]:
    """The frees of storages that computation allocated and other queues have used."""
    queues = queues_on_streams(part.instructions, program.kinds)
    home: dict[int, str] = {}
    users: dict[int, dict[str, int]] = {}
    names: dict[int, set[int]] = {}
    out = []
    for line, (instruction, own) in enumerate(zip(part.instructions, queues, strict=True)):
        for value in (*instruction.inputs, *instruction.outputs):
            storage = program.values[value].storage
            home.setdefault(storage, own if value in instruction.outputs else HOME)
            users.setdefault(storage, {})[own] = line
            names.setdefault(storage, set()).add(value)
        freed: dict[int, list[int]] = {}
        for value in instruction.frees:
            freed.setdefault(program.values[value].storage, []).append(value)
        made = {program.values[value].storage for value in instruction.outputs}
        for storage, gone in freed.items():
            names[storage].difference_update(gone)
            others = tuple(other for queue, other in users[storage].items() if queue != HOME)
            if others and not names[storage] and home[storage] == HOME and storage not in made:
                out.append(_Free(line, tuple(gone), max(program.values[v].bytes for v in gone), others))
    return out


def _without(instructions: Sequence[Instruction], frees: Sequence[_Free]) -> list[Instruction]:
    out = list(instructions)
    for free in frees:
        out[free.line] = replace(out[free.line], frees=tuple(v for v in out[free.line].frees if v not in free.values))
    return out


def _with(instructions: Sequence[Instruction], frees: Sequence[_Free], places: Sequence[int]) -> list[Instruction]:
    out = list(instructions)
    for free, line in zip(frees, places, strict=True):
        out[line] = replace(out[line], frees=(*out[line].frees, *free.values))
    return out


def _places(part: Part, frees: Sequence[_Free], times: StepTimes, position: int) -> list[int]:
    """For each free the last line before computation goes on after all users have ended: there it need not wait for them."""
    lines = list(itertools.compress(itertools.count(), times.at_home[position]))
    starts = [times.start[position][line] for line in lines]
    out = []
    for free in frees:
        ready = max(times.end[position][user] for user in free.users)
        following = max(bisect_left(starts, ready), bisect_right(lines, free.line))
        out.append(max(free.line, lines[following - 1] if following else 0))
    return out


def _within(room: Sequence[float], frees: Sequence[_Free], places: Sequence[int]) -> list[int]:
    """The places of frees, the oldest moved up where there is no room. room: on each line, the bytes that are left if none of
    `frees` is done at all.
    """
    out = list(places)
    by_line, by_place = _grouped([free.line for free in frees]), _grouped(places)
    pending: dict[int, None] = {}  # frees, in the order in which they could be done
    freed = 0
    for line, left in enumerate(room):
        pending.update(dict.fromkeys(by_line.get(line, ())))
        while left + freed < 0 and pending:
            oldest = next(iter(pending))
            out[oldest] = max(frees[oldest].line, line - 1)
            freed += frees[oldest].bytes
            del pending[oldest]
        for done in by_place.get(line, ()):
            if done in pending:
                freed += frees[done].bytes
                del pending[done]
    return out


def _grouped(keys: Sequence[int]) -> dict[int, list[int]]:
    """The indices of each key."""
    out: dict[int, list[int]] = {}
    for index, key in enumerate(keys):
        out.setdefault(key, []).append(index)
    return out
