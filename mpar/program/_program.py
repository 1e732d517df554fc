"""The program: explicit lists of instructions, one for each position along pp. Plain data: it is printed, proved, saved.

A value is one local tensor. An instruction reads values, makes values, and frees the values it is the last to read.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mpar.mesh import Mesh
from mpar.runtime._capture import Replay
from mpar.runtime.comm._channels import Message
from mpar.runtime.comm._comm import Counter
from mpar.program._hardware import hardware
from mpar.ir._kernels import KernelUse
from mpar.program._picture import picture
from mpar.forecast._predict import Hardware, Prediction, memory_timeline, predict
from mpar.runtime._run import Progress, RankRun, State, bind, init_state, simulate
from mpar.runtime.comm._shared_file import ALIGN
from mpar.program._text import text
from mpar.proof._verify import verify
from mpar.schedules import Action, Picture
from mpar.spec import P

__all__ = ["CollectiveUse", "Instruction", "Kind", "Leaf", "Part", "Program", "Value"]


@dataclass(frozen=True)
class Value:
    """One local tensor of one rank: `shape` is local. `storage` says which bytes it lives in (views share one),
    `offset` at which element it begins there."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: P
    storage: int
    offset: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of its elements."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class CollectiveUse:
    """One collective inside a segment: what one rank contributes, the ranks in a group, the line of the model that caused it.

    hidden_flops, hidden_bytes: what is computed while a posted one is on its way. ragged: how it is divided among ranks, and so
    what arrives, is known at run time. most_bytes: of a posted one, what it can be at most where routing decides that; else 0.
    """

    op: str
    axes: tuple[str, ...]
    size: int
    bytes: int
    tensors: int
    line: str
    hidden_flops: int = 0
    hidden_bytes: int = 0
    ragged: bool = False
    most_bytes: int = 0


@dataclass(frozen=True)
class Kind:
    """A segment as code, compiled once however often it is used.

    source:     Python that defines `run(args, comm)`: takes its operands out of the list `args`, returns a tuple.
    constants:  tensors that the code refers to.
    operands / results: local shape and dtype of each.
    positions:  mesh axes along which the code asks for its rank's position.
    kernels:    what carries out its calls of primitives that have kernels.
    memory:     how storages come and go, for predicting memory: see `program/_memory.py`.
    most:       the same where all rows come to one rank, if how many come is known at run time only.
    """

    name: str
    source: str
    constants: dict[str, Tensor]
    collectives: tuple[CollectiveUse, ...]
    flops: int
    bytes: int
    workspace: int
    memory: Any
    num_nodes: int
    operands: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    results: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    positions: tuple[tuple[str, ...], ...]
    kernels: tuple[KernelUse, ...] = ()
    most: Any = None


@dataclass(frozen=True)
class Instruction:
    """One step of the program: `outputs = kind(inputs)`, then `frees` are gone.

    op is one of context, weight, forward, backward, backward_input, backward_weight, gather, reduce, accumulate, offload, fetch,
    send, recv, wait, losses, finish, metrics, norm, update. `segment` says where in the chain, `microbatch` which one (-1: all),
    `slice` which part of its rows, where they are cut into several.

    send and recv only post a message, whose number is the same at both ends; `peer` is the other end's position along pp. A sent
    value stays whole, and a received one may not be read, until the `wait` of the message.
    """

    op: str
    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    frees: tuple[int, ...] = ()
    segment: str = ""
    microbatch: int = -1
    queue: str = "compute"
    message: int = -1
    peer: int = -1
    slice: int = -1

    @property
    def where(self) -> str:
        """Which microbatch, and which slice of its rows, as text shows it: `mb0`, `mb0.2`, or nothing."""
        if self.microbatch < 0:
            return ""
        return f"mb{self.microbatch}" + (f".{self.slice}" if self.slice >= 0 else "")

    @property
    def words(self) -> str:
        """What it does, where in the chain and to which part of the batch: `forward layers.3 mb0.2`."""
        return " ".join(part for part in (self.op, self.segment, self.where) if part)


@dataclass(frozen=True)
class Leaf:
    """One tensor at the program's boundary: a parameter, a slot of the optimizer, a batch entry or a metric."""

    path: str
    value: int
    shape: tuple[int, ...]  # global
    dtype: torch.dtype
    spec: P


@dataclass
class Part:
    """What all ranks at one position along pp do.

    state_in / state_out: parameters then optimizer slots, by path, before and after the step; batch: by (key, piece).
    scalars:              values given by the host each step: lr, step.
    contributions:        values that backward segments give as gradients: (parameter path, use, piece).
    losses:               values that they give as losses, where nothing was left to do before: (segment, piece, which).
    left:                 values that a slice leaves to later ones of its rows: (segment, piece, which).
    gradients:            the finished gradient of each parameter, by path.
    """

    instructions: list[Instruction]
    state_in: list[Leaf]
    state_out: list[Leaf]
    batch: list[Leaf]
    scalars: list[Leaf]
    metrics: list[Leaf]
    contributions: dict[int, tuple[str, str, int]]
    losses: dict[int, tuple[str, int, int]]
    left: dict[int, tuple[str, int, int]]
    gradients: dict[str, int]

    def reads(self) -> Iterator[Leaf]:
        """Everything that is there before the first instruction."""
        yield from self.state_in
        yield from self.batch
        yield from self.scalars


@dataclass
class Program:
    """One training step of every rank. The mesh is refined: an axis may be split into `<axis>_outer` and `<axis>_inner`.

    values: of all parts, numbered through. parts: by position along pp. schedule: per position along pp its actions, in order.
    order_parts: in how many parts a sequence is dealt out to the ranks that share it, see `mpar.arrange.sequence_order`.
    num_slices: into how many slices the rows of a microbatch are cut: its pieces, which are numbered through.
    """

    mesh: Mesh
    values: list[Value]
    kinds: dict[str, Kind]
    parts: list[Part]
    num_microbatches: int
    schedule: list[list[Action]]
    order_parts: int = 1
    num_slices: int = 1
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def num_pieces(self) -> int:
        """Slices of all microbatches."""
        return self.num_microbatches * self.num_slices

    def position(self, rank: int) -> int:
        """The position of a rank along pp."""
        return self.mesh.index(rank, ("pp",))

    def part(self, rank: int) -> Part:
        """What a rank does."""
        return self.parts[self.position(rank)]

    def ranks_at(self, position: int) -> list[int]:
        """The ranks at one position along pp, ascending: they form the mesh without pp."""
        return [rank for rank in range(self.mesh.size) if self.position(rank) == position]

    @property
    def instructions(self) -> list[Instruction]:
        """Those of all parts, one part after the other."""
        return [step for part in self.parts for step in part.instructions]

    @property
    def state_in(self) -> list[Leaf]:
        """The state before a step, every path once; what several parts hold is the first one's."""
        return _once(leaf for part in self.parts for leaf in part.state_in)

    @property
    def state_out(self) -> list[Leaf]:
        """The state after a step, like `state_in`."""
        return _once(leaf for part in self.parts for leaf in part.state_out)

    @property
    def batch(self) -> list[Leaf]:
        """The batch, of which every part has all keys."""
        return self.parts[0].batch

    @property
    def gradients(self) -> dict[str, int]:
        """The finished gradient of each parameter, by path, on the first part that holds it."""
        return {path: value for part in reversed(self.parts) for path, value in part.gradients.items()}

    def axes_used(self) -> list[tuple[str, ...]]:
        """Every tuple of mesh axes over which the code communicates or asks for its position, sorted."""
        found = {use.axes for kind in self.kinds.values() for use in kind.collectives}
        found |= {axes for kind in self.kinds.values() for axes in kind.positions}
        return sorted(found)

    def posted_bytes(self) -> dict[tuple[str, ...], int]:
        """The longest message that is posted over each tuple of axes, with room between its tensors."""
        longest: dict[tuple[str, ...], int] = {}
        for use in (use for kind in self.kinds.values() for use in kind.collectives):
            if use.most_bytes:
                longest[use.axes] = max(longest.get(use.axes, 0), use.most_bytes + ALIGN * use.tensors)
        return longest

    def messages(self) -> list[Message]:
        """Every message of a step, by number."""
        found = [
            Message(step.message, position, step.peer, step.queue[-1], self.values[step.inputs[0]].bytes)
            for position, part in enumerate(self.parts)
            for step in part.instructions
            if step.op == "send"
        ]
        return sorted(found, key=lambda message: message.number)

    def verify(self) -> None:
        """Raise ProgramError, naming the line, unless the program is well-formed; `program/_verify.py` says what that means."""
        verify(self)

    def text(self, rank: int = 0, on: Hardware | str | None = None) -> str:
        """The program of one rank, a line an instruction, with bytes, and times if a profile is given."""
        return text(self, rank, hardware(on) if isinstance(on, str) else on)

    def collectives(self, rank: int = 0) -> list[CollectiveUse]:
        """Every collective of a step of `rank` in order, those inside segments included."""
        return [use for step in self.part(rank).instructions for use in self.kinds[step.kind].collectives]

    def predict(self, on: Hardware | str | None = None) -> Prediction:
        """Peak bytes of a rank exactly, FLOPs and communication; times if a profile is given, or the name of one ("h200")."""
        return predict(self, hardware(on) if isinstance(on, str) else on)

    def peaks(self) -> list[int]:
        """Peak bytes of a rank, per position along pp."""
        return [max((peak for peak, _ in memory_timeline(self, n)), default=0) for n in range(len(self.parts))]

    def picture(self, on: Hardware | str, title: str = "one step") -> Picture:
        """The predicted step as bars and memory curves, for `mpar.schedules.svg`, `html` and `chrome_trace`."""
        return picture(self, hardware(on) if isinstance(on, str) else on, title)

    def init_state(self, params: Any, rank: int | None = None) -> State:
        """The state before the first step, from global parameters or DTensors; `rank` None: global, for `simulate`."""
        return init_state(self, params, rank)

    def simulate(self, state: State, batch: Mapping[str, Tensor]) -> tuple[State, dict[str, Tensor]]:
        """One step of all ranks in this process, on a global state and batch; `state` is left as it was."""
        return simulate(self, state, batch)

    def bind(
        self,
        *,
        device: torch.device | str = "cpu",
        order: str | None = None,
        counter: Counter | None = None,
        progress: Progress | None = None,
        transport: str | None = None,
        execution: str = "eager",
    ) -> RankRun | Replay:
        """This process's rank, ready to run on the processes of torch.distributed; `program/_run.py` has details."""
        return bind(
            self,
            device=device,
            order=order,
            counter=counter,
            progress=progress,
            transport=transport,
            execution=execution,
        )


def _once(leaves: Iterable[Leaf]) -> list[Leaf]:
    """The first leaf of every path."""
    by_path: dict[str, Leaf] = {}
    for leaf in leaves:
        by_path.setdefault(leaf.path, leaf)
    return list(by_path.values())
