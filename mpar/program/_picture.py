"""Picture: the predicted step as bars, with a lane for each position along pp, and the memory that its ranks hold."""

import itertools
from collections.abc import Mapping

from mpar.forecast import StepTimes, memory_timeline, predicted_times
from mpar.hardware import Hardware
from mpar.ir import Instruction, ProgramData
from mpar.program._text import format_bytes, format_time
from mpar.schedules import Bar, Picture

__all__ = ["picture"]

_KINDS = {
    "forward": "F",
    "backward": "B",
    "backward_input": "I",
    "backward_weight": "W",
    "gather": "gather",
    "reduce": "reduce",
    "accumulate": "reduce",
    "update": "update",
}


def picture(program: ProgramData, hardware: Hardware, title: str) -> Picture:
    """The predicted step on `hardware`: a lane for each position along pp, with a row for each of its queues."""
    times = predicted_times(program, hardware)
    bars: list[Bar] = []
    memory = []
    for position in range(len(program.parts)):
        bars += _merged(_bars(program, position, times))
        levels = memory_timeline(program, position)
        moments = [moment for pair in zip(times.start[position], times.end[position], strict=True) for moment in pair]
        in_order = itertools.accumulate(moments, max)  # a queue may run ahead; memory is counted in the order of the program
        memory.append(list(zip(in_order, (size for level in levels for size in level), strict=True)))
    peaks = [round(max(size for _, size in points)) for points in memory]
    facts = {
        "schedule": program.facts.schedule,
        "step": format_time(times.makespan),
        "bubble": f"{100 * times.bubble / times.makespan:.1f} %",
        "bubble between first and last": f"{100 * times.span_bubble / times.makespan:.1f} %",
        "peak memory": f"{format_bytes(max(peaks))} (pp={peaks.index(max(peaks))})",
        "hardware": hardware.name,
    }
    lanes = tuple(f"pp={position}" for position in range(len(program.parts)))
    return Picture(title, lanes, tuple(bars), tuple(memory), "s", facts)


def _bars(program: ProgramData, position: int, times: StepTimes) -> list[Bar]:
    out = []
    stage_of = program.facts.stage_of
    chunks = {stage: n for n, stage in enumerate(sorted({action.stage for action in program.schedule[position]}))}
    for line, instruction in enumerate(program.parts[position].instructions):
        kind = _KINDS.get(instruction.op, "other")
        if instruction.op == "wait":
            continue
        if instruction.op in ("send", "recv"):
            begin, end = times.messages[instruction.message]
            label = f"{instruction.op} {instruction.segment} {instruction.queue[-1]}"
            label += f" {instruction.microbatch}" if instruction.microbatch >= 0 else ""
            out.append(Bar(position, begin, end, label, instruction.op, instruction.queue))
            continue
        begin, end = times.start[position][line], times.end[position][line]
        stage = stage_of.get(instruction.segment)
        is_action = stage is not None and kind in "FBIW"
        label = _label(instruction, stage_of) if is_action else f"{instruction.op} {instruction.segment}".strip()
        chunk = chunks.get(stage, 0) if stage is not None else 0
        out.append(Bar(position, begin, end, label, kind, instruction.queue, chunk))
    return out


def _label(instruction: Instruction, stage_of: Mapping[str, int]) -> str:
    """The actions that an instruction belongs to, as schedules write them: `2F1`, or `2F1+3B0` if it was joined."""
    actions = (f"{stage_of[member.segment]}{_KINDS[member.op]}{member.microbatch}" for member in instruction.alone)
    return "+".join(dict.fromkeys(actions))


def _merged(bars: list[Bar]) -> list[Bar]:
    """Consecutive bars of one action, which has one for each segment, become one bar."""
    out: list[Bar] = []
    for bar in bars:
        last = out[-1] if out else None
        if last is not None and bar.kind in "FBIW" and (bar.label, bar.queue, bar.start) == (last.label, last.queue, last.end):
            out[-1] = last._replace(end=bar.end)
        else:
            out.append(bar)
    return out
