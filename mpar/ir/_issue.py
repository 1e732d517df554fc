"""Order across queues: what each instruction of a rank waits for, where its queues run at the same time.

Three things must be in order across queues. A value is read after it is ready. A storage is overwritten, or returned as a view,
after all earlier reads of it. And freed memory goes back to the queue on which it was allocated, which may use it again at once:
so that queue first waits for the queues that read it. Everything else may overlap.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from mpar.ir._instruction import Instruction
from mpar.ir._kind import Kind
from mpar.ir._values import Value

__all__ = ["HOME", "HOST", "START", "Issue", "plan_streams", "plan_threads", "queues_on_streams"]

HOME = "compute"
"""The queue that runs where the caller runs: state and batch are ready on it, and so are the results at the end."""
HOST = "host"
"""The queue that copies values to the memory of the host and back."""
START = -1
"""The event before the first instruction."""


@dataclass(frozen=True)
class Issue:
    """How an instruction is issued.

    queue:   the queue on which it runs.
    waits:   lines whose events the queue waits for before it runs the instruction.
    records: whether the queue records an event after it.
    holds:   (queue, line) pairs: that queue then waits for the event of that line before it continues.
    """

    queue: str
    waits: tuple[int, ...] = ()
    records: bool = False
    holds: tuple[tuple[str, int], ...] = ()


def plan_streams(instructions: Sequence[Instruction], values: Sequence[Value], kinds: Mapping[str, Kind]) -> list[Issue]:
    """How each instruction of a rank is issued, in their order. If all are on one stream, there are no events.

    An instruction without communication, such as a gather on one rank, which is only a cast, runs on the caller's stream.
    """
    return _Planner(values).plan(instructions, queues_on_streams(instructions, kinds))


def queues_on_streams(instructions: Sequence[Instruction], kinds: Mapping[str, Kind]) -> list[str]:
    """The queue of each instruction in that plan."""
    return [
        instruction.queue
        if instruction.message >= 0 or instruction.queue == HOST or kinds[instruction.kind].collectives
        else HOME
        for instruction in instructions
    ]


def plan_threads(
    instructions: Sequence[Instruction], values: Sequence[Value], kinds: Mapping[str, Kind], threads: Collection[str]
) -> list[Issue]:
    """The same where the queues in `threads` are threads, and all others the caller's. Freed memory needs no order then: whoever
    still reads a tensor holds it.
    """
    queues = [
        instruction.queue
        if instruction.queue in threads and instruction.message < 0 and kinds[instruction.kind].collectives
        else HOME
        for instruction in instructions
    ]
    return _Planner(values, orders_memory=False).plan(instructions, queues)


class _Planner:
    """Goes through the instructions of a rank and remembers which queue made, holds and read what."""

    def __init__(self, values: Sequence[Value], *, orders_memory: bool = True) -> None:
        self.values, self.orders_memory = values, orders_memory
        self.ready: dict[int, tuple[str, int]] = {}  # value -> the queue and line after which it may be read
        self.home: dict[int, str] = {}  # storage -> the queue on which it was allocated
        self.used: dict[int, dict[str, int]] = {}  # storage -> queue -> the last line that touched it
        self.names: dict[int, set[int]] = {}  # storage -> its values that are not yet freed
        self.seen: dict[str, dict[str, int]] = {}  # queue -> other queue -> the last of its lines that it has waited for

    def plan(self, instructions: Sequence[Instruction], queues: Sequence[str]) -> list[Issue]:
        raw: list[tuple[str, list[int], list[tuple[str, int]]]] = []
        last: dict[str, int] = {}
        for line, (instruction, queue) in enumerate(zip(instructions, queues, strict=True)):
            waits = self._before(instruction, queue)
            if queue != HOME and queue not in last:
                waits = [START, *waits]
            last[queue] = line
            self._note(instruction, queue, line)
            at_once, later = self._give_back(instruction) if self.orders_memory else ([], [])
            waits += [awaited for home, awaited in at_once if home == queue]  # it may use the memory of its operands again itself
            raw.append((queue, waits, [hold for hold in at_once if hold[0] != queue] + later))
        if raw:
            raw[-1][2].extend((HOME, end) for queue, end in last.items() if queue != HOME and self._unseen(HOME, queue, end))
        awaited = {line for _, waits, holds in raw for line in (*waits, *(line for _, line in holds))}
        return [Issue(queue, tuple(waits), line in awaited, tuple(holds)) for line, (queue, waits, holds) in enumerate(raw)]

    def _before(self, instruction: Instruction, queue: str) -> list[int]:
        """Lines of other queues for which it must wait: those that made its operands, and users of storages it may write."""
        lines: dict[str, int] = {}
        for value in instruction.inputs:
            maker, line = self.ready.get(value, (HOME, START))
            lines[maker] = max(lines.get(maker, START), line)
        for storage in {self.values[value].storage for value in instruction.outputs}:
            for user, line in self.used.get(storage, {}).items():
                lines[user] = max(lines.get(user, START), line)
        return sorted(line for other, line in lines.items() if line != START and self._unseen(queue, other, line))

    def _note(self, instruction: Instruction, queue: str, line: int) -> None:
        """Remember what an instruction uses and makes."""
        values, used, names = self.values, self.used, self.names
        for touched, home in ((instruction.inputs, HOME), (instruction.outputs, queue)):
            for value in touched:
                storage = values[value].storage  # a view has that of its operand
                users = used.get(storage)
                if users is None:
                    self.home[storage] = home
                    used[storage], names[storage] = {queue: line}, {value}
                else:
                    users[queue] = line
                    names[storage].add(value)
        # a received value is ready after the wait
        made = instruction.inputs if instruction.op == "wait" else instruction.outputs
        for value in made:
            self.ready[value] = (queue, line)

    def _give_back(self, instruction: Instruction) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
        """(queue, line) pairs: for which lines the queues wait on which the freed storages were allocated. First those of
        operands and results, which go while the instruction runs, then those of other values, which go after it.
        """
        at_once: list[tuple[str, int]] = []
        later: list[tuple[str, int]] = []
        own = {self.values[value].storage for value in (*instruction.inputs, *instruction.outputs)}
        for value in instruction.frees:
            storage = self.values[value].storage
            self.names[storage].discard(value)
            if self.names[storage]:
                continue
            home = self.home.pop(storage, HOME)
            for user, line in self.used.pop(storage, {}).items():
                if self._unseen(home, user, line):
                    (at_once if storage in own else later).append((home, line))
        return at_once, later

    def _unseen(self, queue: str, other: str, line: int) -> bool:
        """Whether `queue` still has to wait for `line` of `other`. Notes that it then does, so the answer is true only once."""
        if queue == other or self.seen.setdefault(queue, {}).get(other, START) >= line:
            return False
        self.seen[queue][other] = line
        return True
