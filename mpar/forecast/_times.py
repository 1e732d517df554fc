"""Times: when every instruction at every position along pp begins and ends, if each runs as early as possible."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpar.errors import ProgramError
from mpar.ir import Instruction, Part, ProgramData

__all__ = ["StepTimes", "step_times"]


@dataclass(frozen=True)
class StepTimes:
    """The times of one step, in seconds from its beginning.

    start, end: per position along pp, of each instruction. messages: (start, end) of each message, by its number.
    busy:       per position, the time that its instructions take.
    span:       per position, the time that it idles between the beginning of its first forward and the end of its last backward.
    """

    start: list[list[float]]
    end: list[list[float]]
    busy: list[float]
    messages: dict[int, tuple[float, float]]
    span: list[float]

    @property
    def makespan(self) -> float:
        """The time at which the last instruction ends."""
        return max((ends[-1] for ends in self.end if ends), default=0.0)

    @property
    def bubble(self) -> float:
        """The makespan less the time that the busiest rank works."""
        return self.makespan - max(self.busy, default=0.0)

    @property
    def span_bubble(self) -> float:
        """The longest time that a rank idles between its first forward and its last backward."""
        return max(self.span, default=0.0)


class _Clock:
    """The messages that were posted so far. Messages in one direction between two positions travel one after the other.

    posted: when the first end of each message was posted, then when both were. messages: when each message begins and ends.
    free:   when the channel from one position to another is free again.
    """

    def __init__(self, durations: Mapping[int, float]) -> None:
        self.durations = durations
        self.posted: dict[int, float] = {}
        self.messages: dict[int, tuple[float, float]] = {}
        self.free: dict[tuple[int, int], float] = {}

    def post(self, instruction: Instruction, position: int, now: float) -> None:
        """Post one end of a message. It begins when both ends are posted and the channel is free."""
        pair = (position, instruction.peer) if instruction.op == "send" else (instruction.peer, position)
        if instruction.message not in self.posted:
            self.posted[instruction.message] = now
            return
        self.posted[instruction.message] = max(now, self.posted[instruction.message])
        begin = max(self.posted[instruction.message], self.free.get(pair, 0.0))
        self.free[pair] = end = begin + self.durations.get(instruction.message, 0.0)
        self.messages[instruction.message] = (begin, end)


def step_times(program: ProgramData, durations: Sequence[Sequence[float]], messages: Mapping[int, float]) -> StepTimes:
    """The times of a step, given the seconds of each instruction per position, and of each message. Linear in the instructions.

    Raises ProgramError if ranks would wait for ever, as in a program that `verify` refuses.
    """
    clock, num = _Clock(messages), len(program.parts)
    crossing = {name for name, kind in program.kinds.items() if num > 1 and any("pp" in use.axes for use in kind.collectives)}
    start: list[list[float]] = [[] for _ in program.parts]
    end: list[list[float]] = [[] for _ in program.parts]
    busy, now, num_met = [0.0] * num, [0.0] * num, [0] * num
    meetings: list[dict[int, float]] = []  # of collectives over pp, in order: when each position arrives
    progress = True
    while progress:
        progress = False
        for position, part in enumerate(program.parts):
            while len(end[position]) < len(part.instructions):
                line = len(end[position])
                instruction, duration, begin = part.instructions[line], durations[position][line], now[position]
                if instruction.op == "wait":
                    if instruction.message not in clock.messages:
                        break
                    begin = max(begin, clock.messages[instruction.message][1])
                elif instruction.kind in crossing:
                    if len(meetings) <= num_met[position]:
                        meetings.append({})
                    meeting = meetings[num_met[position]]
                    meeting[position] = begin
                    if len(meeting) < num:
                        break
                    begin, num_met[position] = max(meeting.values()), num_met[position] + 1
                elif instruction.op in ("send", "recv"):
                    clock.post(instruction, position, begin)
                start[position].append(begin)
                end[position].append(begin + duration)
                now[position] = begin + duration
                busy[position] += duration
                progress = True
    if any(len(ends) < len(part.instructions) for ends, part in zip(end, program.parts, strict=True)):
        raise ProgramError("this program cannot be timed: some of its ranks wait for each other for ever; verify() says which")
    spans = [_span(part, *times) for part, *times in zip(program.parts, start, end, durations, strict=True)]
    return StepTimes(start, end, busy, clock.messages, spans)


def _span(part: Part, start: Sequence[float], end: Sequence[float], durations: Sequence[float]) -> float:
    """The time that a position idles between its first forward and its last backward."""
    lines = [line for line, instruction in enumerate(part.instructions) if instruction.op.startswith(("forward", "backward"))]
    if not lines:
        return 0.0
    first, last = lines[0], lines[-1]
    return end[last] - start[first] - sum(durations[first : last + 1])
