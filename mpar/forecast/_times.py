"""Times: when every instruction at every position along pp begins and ends, if each runs as early as its order permits.

The queues of a rank run at the same time, ordered as `mpar.ir.plan_streams` says, unless the hardware runs one thing at a time.
Messages in one direction between two positions travel one after the other, and so do collectives of a rank's queues over the
same links. Collectives inside segments take part in neither: their time is part of the segment's.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from mpar.errors import ProgramError
from mpar.ir import HOME, Instruction, Issue, Part, ProgramData, plan_streams

__all__ = ["StepTimes", "step_times"]


@dataclass(frozen=True)
class StepTimes:
    """The times of one step, in seconds from its beginning.

    start, end: per position along pp, of each instruction. messages: (start, end) of each message, by its number.
    busy:       per position, the time that its queue of computation works.
    exposed:    per position, by line, how long computation waits for the collective or copy of that line.
    at_home:    per position, whether each line runs on the queue of computation.
    span:       per position, the time that it idles between the beginning of its first forward and the end of its last backward,
                but for what is exposed.
    """

    start: list[list[float]]
    end: list[list[float]]
    busy: list[float]
    messages: dict[int, tuple[float, float]]
    exposed: list[dict[int, float]]
    at_home: list[list[bool]]
    span: list[float]

    @property
    def makespan(self) -> float:
        """The time at which the last instruction ends."""
        return max((max(ends) for ends in self.end if ends), default=0.0)

    @property
    def bubble(self) -> float:
        """The makespan less the time that the busiest rank works, or waits for collectives and copies of its own."""
        return max(0.0, self.makespan - max(map(self.occupied, range(len(self.busy))), default=0.0))

    def occupied(self, position: int) -> float:
        """The time that a position computes, or waits for collectives and copies of its own."""
        return self.busy[position] + sum(self.exposed[position].values())

    @property
    def span_bubble(self) -> float:
        """The longest time that a rank idles between its first forward and its last backward."""
        return max(self.span, default=0.0)


class _Messages:
    """The messages that were posted so far. Messages in one direction between two positions travel one after the other.

    posted: when the first end of each message was posted, then when both were. times: when each message begins and ends.
    free:   when the channel from one position to another is free again.
    """

    def __init__(self, durations: Mapping[int, float]) -> None:
        self.durations = durations
        self.posted: dict[int, float] = {}
        self.times: dict[int, tuple[float, float]] = {}
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
        self.times[instruction.message] = (begin, end)


class _Links:
    """The links of one rank, which one collective uses at a time; a later one may use them in a pause between earlier ones.

    contention: by what share computation is slower while they are used.
    """

    def __init__(self, contention: float) -> None:
        self.contention = contention
        self._taken: list[tuple[float, float]] = []

    def take(self, earliest: float, duration: float) -> float:
        """Take the links from `earliest` on, or from when they are free for long enough; returns from when."""
        begin = earliest
        for start, end in self._taken[max(0, bisect_left(self._taken, (earliest, earliest)) - 1) :]:
            if start >= begin + duration:
                break
            begin = max(begin, end)
        if duration:
            insort(self._taken, (begin, begin + duration))
        return begin

    def end_of_work(self, begin: float, duration: float) -> float:
        """When computation of `duration` ends that begins at `begin`, and is slower while the links are used."""
        now, remaining = begin, duration
        for start, end in self._taken[max(0, bisect_left(self._taken, (begin, begin)) - 1) :]:
            free = max(0.0, start - now)
            if remaining <= free:
                break
            now, remaining = now + free, remaining - free
            done = min(remaining, max(0.0, end - now) / (1 + self.contention))
            now, remaining = now + done * (1 + self.contention), remaining - done
        return now + remaining


@dataclass
class _Rank:
    """What is known of a position so far: the times of its lines, and when each of its queues is free.

    communicating: the kinds that take the links.
    worked: when each queue ended its last line. behind: the line that a queue waits for, where that decides when it is free.
    """

    part: Part
    communicating: Collection[str]
    durations: Sequence[float]
    issues: Sequence[Issue]
    links: "_Links"
    start: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)
    free: dict[str, float] = field(default_factory=dict)
    worked: dict[str, float] = field(default_factory=dict)
    behind: dict[str, int] = field(default_factory=dict)
    exposed: dict[int, float] = field(default_factory=dict)
    num_met: int = 0

    @property
    def line(self) -> int:
        """The line that is next."""
        return len(self.end)

    def earliest(self) -> float:
        """When the next line can begin: its queue is free, and what it waits for has ended."""
        issue = self.issues[self.line]
        for other in issue.waits:
            if other >= 0:
                self._wait(issue.queue, other)
        return self.free.get(issue.queue, 0.0)

    def _wait(self, queue: str, line: int) -> None:
        if self.end[line] > self.free.get(queue, 0.0):
            self.free[queue], self.behind[queue] = self.end[line], line

    def run(self, begin: float) -> None:
        """Run the next line from `begin` on."""
        line, issue = self.line, self.issues[self.line]
        if issue.queue == HOME:
            self._note_exposed()
        elif self.part.instructions[line].kind in self.communicating:
            begin = self.links.take(begin, self.durations[line])
        end = begin + self.durations[line]
        if issue.queue == HOME and self.links.contention:
            end = self.links.end_of_work(begin, self.durations[line])
        self.start.append(begin)
        self.end.append(end)
        self.free[issue.queue] = self.worked[issue.queue] = end
        self.behind.pop(issue.queue, None)
        for queue, other in issue.holds:
            self._wait(queue, other)
        if line == len(self.part.instructions) - 1 and HOME in self.behind:
            self._note_exposed()

    def _note_exposed(self) -> None:
        """Note how long computation waited for the line that it is behind, if there is one."""
        if HOME in self.behind:
            line = self.behind[HOME]
            self.exposed[line] = self.exposed.get(line, 0.0) + self.free[HOME] - self.worked.get(HOME, 0.0)


def step_times(
    program: ProgramData,
    durations: Sequence[Sequence[float]],
    messages: Mapping[int, float],
    *,
    overlaps: bool = True,
    contention: float = 0.0,
) -> StepTimes:
    """The times of a step, given the seconds of each instruction per position, and of each message.

    overlaps:   whether queues run at the same time; if not, a rank runs one instruction after the other.
    contention: by what share computation is slower while a collective runs.
    Raises ProgramError if ranks would wait for ever, as in a program that `verify` refuses.
    """
    clock, num = _Messages(messages), len(program.parts)
    crossing = {name for name, kind in program.kinds.items() if num > 1 and any("pp" in use.axes for use in kind.collectives)}
    communicating = {name for name, kind in program.kinds.items() if kind.collectives}
    ranks = [
        _Rank(part, communicating, own, _issues(program, part, overlaps=overlaps), _Links(contention))
        for part, own in zip(program.parts, durations, strict=True)
    ]
    meetings: list[dict[int, float]] = []  # of collectives over pp, in order: when each position arrives
    progress = True
    while progress:
        progress = False
        for position, rank in enumerate(ranks):
            while rank.line < len(rank.part.instructions):
                instruction, begin = rank.part.instructions[rank.line], rank.earliest()
                if instruction.op == "wait":
                    if instruction.message not in clock.times:
                        break
                    begin = max(begin, clock.times[instruction.message][1])
                elif instruction.kind in crossing:
                    met = _meet(meetings, rank.num_met, position, begin)
                    if len(met) < num:
                        break
                    begin, rank.num_met = max(met.values()), rank.num_met + 1
                elif instruction.op in ("send", "recv"):
                    clock.post(instruction, position, begin)
                rank.run(begin)
                progress = True
    if any(rank.line < len(rank.part.instructions) for rank in ranks):
        raise ProgramError("this program cannot be timed: some of its ranks wait for each other for ever; verify() says which")
    return _told(ranks, clock)


def _told(ranks: Sequence[_Rank], clock: _Messages) -> StepTimes:
    return StepTimes(
        [rank.start for rank in ranks],
        [rank.end for rank in ranks],
        [_worked(rank, _at_home(rank)) for rank in ranks],
        clock.times,
        [rank.exposed for rank in ranks],
        [[issue.queue == HOME for issue in rank.issues] for rank in ranks],
        [_span(rank) for rank in ranks],
    )


def _issues(program: ProgramData, part: Part, *, overlaps: bool) -> list[Issue]:
    if overlaps:
        return plan_streams(part.instructions, program.values, program.kinds)
    return [Issue(HOME) for _ in part.instructions]


def _meet(meetings: list[dict[int, float]], number: int, position: int, begin: float) -> dict[int, float]:
    """Note that a position arrives at a collective over pp; returns when each position has arrived so far."""
    if len(meetings) <= number:
        meetings.append({})
    meetings[number][position] = begin
    return meetings[number]


def _at_home(rank: _Rank, first: int = 0, last: int | None = None) -> list[int]:
    """The lines from `first` to `last` that run on the queue of computation."""
    stop = len(rank.issues) if last is None else last + 1
    return [line for line in range(first, stop) if rank.issues[line].queue == HOME]


def _worked(rank: _Rank, lines: Sequence[int]) -> float:
    return sum(rank.end[line] - rank.start[line] for line in lines)


def _span(rank: _Rank) -> float:
    """The time that a position idles between its first forward and its last backward, but for what is exposed."""
    names = ("forward", "backward")
    lines = [line for line, instruction in enumerate(rank.part.instructions) if instruction.op.startswith(names)]
    if not lines:
        return 0.0
    first, last = lines[0], lines[-1]
    worked = _worked(rank, _at_home(rank, first, last))
    waited = sum(seconds for line, seconds in rank.exposed.items() if first < line <= last)
    return rank.end[last] - rank.start[first] - worked - waited
