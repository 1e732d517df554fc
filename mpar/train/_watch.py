"""Watchdog: every rank keeps its place in a small memory-mapped file, which the launcher can read after the rank is gone."""

import mmap
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from mpar.program import CollectiveUse, Counter, Instruction, Program
from mpar.train._place import SLOTS, Phase, Place

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Watch", "describe_place", "waits_for_others"]


class Watch(Counter):
    """Writes the place of this rank: the program's `progress` callback and its transport counter. A call takes under 1 us."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        path.write_bytes(bytes(SLOTS.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), SLOTS.size)
        self._slots = memoryview(self._map).cast("q")
        self._lock = threading.Lock()
        self.enter(Phase.BEGIN)

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: "TracebackType | None") -> None:
        self._slots.release()
        self._map.close()

    def begin_step(self, step: int) -> None:
        """Note that `step` is about to run."""
        self._slots[0] = step
        self.enter(Phase.STEP)

    def begin_evaluation(self) -> None:
        """Note that lines are of the program that evaluates, until `between_steps` is called."""
        self.enter(Phase.EVALUATION)

    def between_steps(self, step: int) -> None:
        """Note that `step` is done and that no line runs."""
        self._slots[0] = step
        self.enter(Phase.BETWEEN)

    def enter(self, phase: Phase) -> None:
        """Note what this rank is about to do. No line runs yet."""
        slots = self._slots
        slots[1], slots[3], slots[5] = -1, time.time_ns(), phase

    def __call__(self, line: int, instruction: Instruction) -> None:
        """Note that this rank begins `line`."""
        slots = self._slots
        slots[1] = line
        slots[2] = 0
        slots[3] = time.time_ns()

    def add(self, op: str, axes: tuple[str, ...], tensors: Sequence[Tensor]) -> None:
        """Note that this rank begins a collective."""
        self._slots[2] += 1
        self.add_bytes(tensors)

    def add_bytes(self, tensors: Sequence[Tensor]) -> None:
        """Note that this rank gives these tensors to others."""
        size = sum(tensor.nbytes for tensor in tensors)
        with self._lock:  # of several threads
            self._slots[4] += size

    def waits(self, line: int, instruction: Instruction) -> None:
        """Note that this rank waits for another thread, which runs `line`."""
        self(line, instruction)
        self._slots[2] = 1

    def of_thread(self) -> Counter:
        """A counter of bytes only: the line that begins a collective on another thread is not the one that runs."""
        return _OfThread(self)

    @property
    def communication_bytes(self) -> int:
        """Bytes that this rank has given to collectives and messages so far."""
        return self._slots[4]


class _OfThread(Counter):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def add(self, op: str, axes: tuple[str, ...], tensors: Sequence[Tensor]) -> None:
        self._watch.add_bytes(tensors)


def waits_for_others(program: Program, rank: int, place: Place) -> bool:
    """Whether a rank at `place`, a line of `program`, is in a collective, or waits for one of another thread or for a message."""
    instruction = program.part(rank).instructions[place.line]
    if instruction.message >= 0:
        return instruction.op == "wait"
    return place.collectives > 0


def describe_place(program: Program, rank: int, place: Place | None, *, dead: bool = False) -> str:
    """`place` in words: `rank 1, step 12, line 0031 backward layers.2 mb0: waits in reduce_scatter over tp with rank 0`.

    program: the program that `place.line` belongs to. dead: the rank is gone, so the text says what it was doing.
    """
    if place is None:
        return f"rank {rank}: had not begun"
    if place.line < 0:
        return f"rank {rank}, {_outside(place)}"
    instruction = program.part(rank).instructions[place.line]
    when = f"evaluation after step {place.step}" if place.evaluating else f"step {place.step}"
    head = f"rank {rank}, {when}, line {place.line:04d} {instruction.words}"
    if instruction.message >= 0:
        does = {"wait": "waits for", "send": "gives away", "recv": "asks for"}[instruction.op]
        did = {"wait": "waited for", "send": "was giving away", "recv": "was asking for"}[instruction.op]
        return f"{head}: {did if dead else does} {_message(program, rank, instruction)}"
    uses = program.kinds[instruction.kind].collectives
    if not uses or not place.collectives:
        return f"{head}: computes"
    use = uses[min(place.collectives, len(uses)) - 1]
    return f"{head}: {'was in' if dead else 'waits in'} {_collective(program, rank, use)}"


def _outside(place: Place) -> str:
    """Where a rank is that runs no line."""
    if place.phase == Phase.BEGIN:
        return "start-up: loading the job, the data and the state"
    if place.phase == Phase.MEET:
        return f"after step {place.step}: waits for all ranks to agree" if place.step else "start-up: waits for the other ranks"
    if place.phase == Phase.SAVE:
        return f"after step {place.step}: saving a checkpoint"
    if place.phase == Phase.BATCH:
        return f"after step {place.step}: drawing answers, or rewarding them"
    if place.phase == Phase.BETWEEN:
        return f"after step {place.step}: between two steps"
    return f"{'evaluation after step' if place.evaluating else 'step'} {place.step}: had not begun its first line"


def _message(program: Program, rank: int, instruction: Instruction) -> str:
    """A message in words: `message 41 (x4.0) from rank 2, which sends it in line 0097`."""
    peer = program.mesh.rank({**program.mesh.coordinates(rank), "pp": instruction.peer})
    lines = program.parts[instruction.peer].instructions
    ends = [(number, other.op) for number, other in enumerate(lines) if other.message == instruction.message]
    sent = next((number for number, op in ends if op == "send"), None)
    value = next(value for value in (*instruction.inputs, *instruction.outputs))
    head = f"message {instruction.message} ({program.values[value].name})"
    if sent is not None:
        return f"{head} from rank {peer}, which sends it in line {sent:04d}"
    return f"{head} to rank {peer}, which waits for it in line {next(n for n, op in ends if op == 'wait'):04d}"


def _collective(program: Program, rank: int, use: CollectiveUse) -> str:
    others = [str(other) for other in program.mesh.group(rank, use.axes) if other != rank]
    shown = others if len(others) <= 8 else [*others[:7], f"... {others[-1]}"]
    return f"{use.op} over {' x '.join(use.axes)} with rank{'s' if len(others) > 1 else ''} {', '.join(shown)}"
