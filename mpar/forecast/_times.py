"""Times: when every instruction of every position along pp begins and ends, if each runs as early as it can."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpar.errors import ProgramError
from mpar.ir import Instruction, Part, ProgramData

__all__ = ["StepTimes", "step_times"]


@dataclass(frozen=True)
class StepTimes:
    """start, end: seconds, per position along pp and instruction. busy: seconds per position. messages: (start, end) of each.

    span: per position the time from its first forward to its last backward, without what it is busy in between.
    """

    start: list[list[float]]
    end: list[list[float]]
    busy: list[float]
    messages: dict[int, tuple[float, float]]
    span: list[float]

    @property
    def makespan(self) -> float:
        """From the first beginning to the last end."""
        return max((own[-1] for own in self.end if own), default=0.0)

    @property
    def bubble(self) -> float:
        """The makespan without the time of the busiest rank."""
        return self.makespan - max(self.busy, default=0.0)

    @property
    def span_bubble(self) -> float:
        """The longest time that a rank idles between its first forward and its last backward."""
        return max(self.span, default=0.0)


class _Clock:
    """Messages and meetings as far as they are known. Messages of one direction between two ranks follow each other."""

    def __init__(self, durations: Mapping[int, float]) -> None:
        self.durations = durations
        self.posted: dict[int, float] = {}
        self.messages: dict[int, tuple[float, float]] = {}
        self.free: dict[tuple[int, int], float] = {}

    def post(self, instruction: Instruction, position: int, now: float) -> None:
        """One end of a message is there; when both are, and the channel is free, it starts."""
        pair = (position, instruction.peer) if instruction.op == "send" else (instruction.peer, position)
        if instruction.message not in self.posted:
            self.posted[instruction.message] = now
            return
        self.posted[instruction.message] = max(now, self.posted[instruction.message])
        begin = max(self.posted[instruction.message], self.free.get(pair, 0.0))
        self.free[pair] = end = begin + self.durations.get(instruction.message, 0.0)
        self.messages[instruction.message] = (begin, end)


def step_times(program: ProgramData, durations: Sequence[Sequence[float]], messages: Mapping[int, float]) -> StepTimes:
    """durations: seconds, per position and instruction; messages: seconds of each message. Linear in the instructions.

    Raises ProgramError if the program cannot be run to its end, which `verify` would have refused.
    """
    clock, num = _Clock(messages), len(program.parts)
    crossing = {name for name, kind in program.kinds.items() if num > 1 and any("pp" in use.axes for use in kind.collectives)}
    start: list[list[float]] = [[] for _ in program.parts]
    end: list[list[float]] = [[] for _ in program.parts]
    busy, now, met = [0.0] * num, [0.0] * num, [0] * num
    arrivals: list[dict[int, float]] = []
    moved = True
    while moved:
        moved = False
        for position, part in enumerate(program.parts):
            while len(end[position]) < len(part.instructions):
                line = len(end[position])
                instruction, duration, begin = part.instructions[line], durations[position][line], now[position]
                if instruction.op == "wait":
                    if instruction.message not in clock.messages:
                        break
                    begin = max(begin, clock.messages[instruction.message][1])
                elif instruction.kind in crossing:
                    if len(arrivals) <= met[position]:
                        arrivals.append({})
                    meeting = arrivals[met[position]]
                    meeting[position] = begin
                    if len(meeting) < num:
                        break
                    begin, met[position] = max(meeting.values()), met[position] + 1
                elif instruction.op in ("send", "recv"):
                    clock.post(instruction, position, begin)
                start[position].append(begin)
                end[position].append(begin + duration)
                now[position] = begin + duration
                busy[position] += duration
                moved = True
    if any(len(own) < len(part.instructions) for own, part in zip(end, program.parts, strict=True)):
        raise ProgramError("this program cannot be timed: its ranks wait for each other for ever; verify() says why")
    spans = [_span(part, *times) for part, *times in zip(program.parts, start, end, durations, strict=True)]
    return StepTimes(start, end, busy, clock.messages, spans)


def _span(part: Part, start: Sequence[float], end: Sequence[float], durations: Sequence[float]) -> float:
    lines = [line for line, instruction in enumerate(part.instructions) if instruction.op.startswith(("forward", "backward"))]
    if not lines:
        return 0.0
    first, last = lines[0], lines[-1]
    return end[last] - start[first] - sum(durations[first : last + 1])
