"""Memory of a step, exactly: the bytes that a rank holds at every instruction, counted by storages."""

from collections import Counter
from collections.abc import Iterator

from mpar.ir import HOME, Instruction, Part, ProgramData, SegmentMemory, queues_on_streams, sweep

__all__ = ["host_bytes", "memory_timeline", "pools", "timeline"]


def memory_timeline(program: ProgramData, position: int = 0) -> list[tuple[int, int]]:
    """For each instruction of one position along pp: the most bytes while it runs, and the bytes after it. State, batch,
    constants and the values of messages are included."""
    return list(timeline(program, program.parts[position]))


def timeline(program: ProgramData, part: Part, *, workspace: bool = False, all_rows: bool = False) -> Iterator[tuple[int, int]]:
    """`memory_timeline` of a part; workspace: with that inside ops; all_rows: as if a router sent all rows to this rank."""
    storages = _Storages(program, part)
    live = _constants(program, part) + sum(storages.sizes.values())
    for instruction in part.instructions:
        kind = program.kinds[instruction.kind]
        memory = kind.memory_if_rows_meet if all_rows and kind.memory_if_rows_meet is not None else kind.memory
        released = storages.released_by(instruction)
        peak = live + sweep(memory, storages.donated_to(instruction, memory, released), workspace=workspace)
        live += sum(storages.make(instruction, memory).values())
        peak = max(peak, live - storages.gone(instruction, released))
        live -= sum(storages.free(instruction).values())
        yield max(peak, live), live


def pools(program: ProgramData, part: Part) -> dict[str, int]:
    """For each queue that is a stream on a GPU, the most bytes that are allocated on its stream at one time.

    torch's allocator keeps the memory that a stream gives back for that stream, so a rank reserves their sum. State, batch and
    constants are in the pool of HOME. What is posted inside an instruction counts as that of its queue.
    """
    storages = _Storages(program, part)
    live = Counter({HOME: _constants(program, part) + sum(storages.sizes.values())})
    home = dict.fromkeys(storages.sizes, HOME)
    peaks = Counter(live)
    queues = queues_on_streams(part.instructions, program.kinds)
    for instruction, queue in zip(part.instructions, queues, strict=True):
        memory = program.kinds[instruction.kind].memory
        own = {storage for storage in storages.released_by(instruction) if home.get(storage) == queue}
        peak = live[queue] + sweep(memory, storages.donated_to(instruction, memory, own))
        for storage, size in storages.make(instruction, memory).items():
            home[storage] = queue
            live[queue] += size
        peaks[queue] = max(peaks[queue], peak, live[queue] - storages.gone(instruction, own))
        for storage, size in storages.free(instruction).items():
            live[home.pop(storage)] -= size
    return {queue: peak for queue, peak in peaks.items() if peak}


def _constants(program: ProgramData, part: Part) -> int:
    used = {instruction.kind for instruction in part.instructions}
    return sum(t.nbytes for name in used for t in program.kinds[name].constants.values())


class _Storages:
    """The storages that a rank holds: their sizes in bytes, and how many live values lie in each."""

    def __init__(self, program: ProgramData, part: Part) -> None:
        """What exists before the first instruction: state, batch and scalars."""
        self.sizes: dict[int, int] = {}
        self._values, self._users = program.values, dict[int, int]()
        batch: Counter[int] = Counter()
        for leaf in part.batch:
            batch[self._values[leaf.value].storage] += self._values[leaf.value].bytes
        for leaf in part.reads():
            self._hold(leaf.value, batch.get(self._values[leaf.value].storage, self._values[leaf.value].bytes))

    def _hold(self, value: int, size: int) -> None:
        storage = self._values[value].storage
        self._users[storage] = self._users.get(storage, 0) + 1
        self.sizes[storage] = max(self.sizes.get(storage, 0), size)

    def released_by(self, instruction: Instruction) -> set[int]:
        """The storages of operands of which an instruction frees the last value, so that its code gives them back."""
        freed = Counter(self._values[v].storage for v in set(instruction.frees))
        operands = {self._values[v].storage for v in instruction.inputs}
        return {storage for storage, count in freed.items() if storage in operands and self._users[storage] == count}

    def donated_to(self, instruction: Instruction, memory: SegmentMemory, released: set[int]) -> frozenset[int]:
        """Those of `released` that are operands of an instruction, as its code numbers them: it gives them back while it runs."""
        operands = zip(memory.inputs, instruction.inputs, strict=True)
        return frozenset(local for local, v in operands if self._values[v].storage in released)

    def make(self, instruction: Instruction, memory: SegmentMemory) -> dict[int, int]:
        """Hold the results of an instruction; returns the new storages and their sizes."""
        new: dict[int, int] = {}
        for local, v in zip(memory.outputs, instruction.outputs, strict=True):
            if self._values[v].storage not in self._users:
                new[self._values[v].storage] = memory.sizes[local]
            self._hold(v, memory.sizes[local])
        return new

    def gone(self, instruction: Instruction, released: set[int]) -> int:
        """The bytes of `released` that are gone when an instruction ends: all but what it returns."""
        return sum(self.sizes[s] for s in released - {self._values[v].storage for v in instruction.outputs})

    def free(self, instruction: Instruction) -> dict[int, int]:
        """Drop the values that an instruction frees; returns the storages that are gone and their sizes."""
        gone: dict[int, int] = {}
        for v in set(instruction.frees):
            storage = self._values[v].storage
            self._users[storage] -= 1
            if not self._users[storage]:
                del self._users[storage]
                gone[storage] = self.sizes.pop(storage)
        return gone


def host_bytes(program: ProgramData, part: Part) -> int:
    """The most bytes that are in the memory of the host at one time."""
    held = memory_if_rows_meet = 0
    offloaded: set[int] = set()
    for instruction in part.instructions:
        if instruction.op == "offload":
            offloaded.add(instruction.outputs[0])
            held += program.values[instruction.outputs[0]].bytes
        memory_if_rows_meet = max(memory_if_rows_meet, held)
        held -= sum(program.values[v].bytes for v in instruction.frees if v in offloaded)
    return memory_if_rows_meet
