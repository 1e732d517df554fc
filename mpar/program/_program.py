"""The program: an explicit list of instructions, the same for all ranks of a stage. Plain data: it is printed, proved, saved.

A value is one local tensor. An instruction reads values, makes values, and frees the values it is the last to read.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mpar.mesh import Mesh
from mpar.program._comm import Counter
from mpar.program._hardware import hardware
from mpar.program._predict import Hardware, Prediction, predict
from mpar.program._run import Progress, RankRun, State, bind, init_state, simulate
from mpar.program._text import text
from mpar.program._verify import verify
from mpar.spec import P

__all__ = ["CollectiveUse", "Instruction", "Kind", "Leaf", "Program", "Value"]


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
    """One collective inside a segment: what one rank contributes, the ranks in a group, the line of the model that caused it."""

    op: str
    axes: tuple[str, ...]
    size: int
    bytes: int
    tensors: int
    line: str


@dataclass(frozen=True)
class Kind:
    """A segment as code, compiled once however often it is used.

    source:     Python that defines `run(args, comm)`: takes its operands out of the list `args`, returns a tuple.
    constants:  tensors that the code refers to.
    operands / results: local shape and dtype of each.
    positions:  mesh axes along which the code asks for its rank's position.
    memory:     how storages come and go, for predicting memory: see `program/_memory.py`.
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


@dataclass(frozen=True)
class Instruction:
    """One step of the program: `outputs = kind(inputs)`, then `frees` are gone.

    op is one of context, weight, forward, backward, gather, reduce, accumulate, norm, update, finish. `segment` says where in the
    chain, `microbatch` which one (-1: all of them).
    """

    op: str
    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    frees: tuple[int, ...] = ()
    segment: str = ""
    microbatch: int = -1
    queue: str = "compute"


@dataclass(frozen=True)
class Leaf:
    """One tensor at the program's boundary: a parameter, a slot of the optimizer, a batch entry or a metric."""

    path: str
    value: int
    shape: tuple[int, ...]  # global
    dtype: torch.dtype
    spec: P


@dataclass
class Program:
    """One training step of every rank. The mesh is refined: an axis may be split into `<axis>_outer` and `<axis>_inner`.

    state_in / state_out: parameters then optimizer slots, by path, before and after the step; batch: by (key, microbatch).
    scalars:              values given by the host each step: lr, step.
    contributions:        values that backward segments give as gradients: (parameter path, use, microbatch).
    gradients:            the finished gradient of each parameter, by path.
    """

    mesh: Mesh
    values: list[Value]
    kinds: dict[str, Kind]
    instructions: list[Instruction]
    state_in: list[Leaf]
    state_out: list[Leaf]
    batch: list[Leaf]
    scalars: list[Leaf]
    metrics: list[Leaf]
    num_microbatches: int
    contributions: dict[int, tuple[str, str, int]]
    gradients: dict[str, int]
    info: dict[str, Any] = field(default_factory=dict)

    def reads(self) -> Iterator[Leaf]:
        """Everything that is there before the first instruction."""
        yield from self.state_in
        yield from self.batch
        yield from self.scalars

    def axes_used(self) -> list[tuple[str, ...]]:
        """Every tuple of mesh axes over which the code communicates or asks for its position, sorted."""
        found = {use.axes for kind in self.kinds.values() for use in kind.collectives}
        found |= {axes for kind in self.kinds.values() for axes in kind.positions}
        return sorted(found)

    def verify(self) -> None:
        """Raise ProgramError, naming the line, unless the program is well-formed; `program/_verify.py` says what that means."""
        verify(self)

    def text(self, rank: int = 0, on: Hardware | str | None = None) -> str:
        """The program of one rank, a line an instruction, with bytes, and times if a profile is given."""
        return text(self, rank, hardware(on) if isinstance(on, str) else on)

    def collectives(self) -> list[CollectiveUse]:
        """Every collective of a step in order, those inside segments included."""
        return [use for step in self.instructions for use in self.kinds[step.kind].collectives]

    def predict(self, on: Hardware | str | None = None) -> Prediction:
        """Peak bytes of a rank exactly, FLOPs and communication; times if a profile is given, or the name of one ("h200")."""
        return predict(self, hardware(on) if isinstance(on, str) else on)

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
    ) -> RankRun:
        """This process's rank, ready to run on the processes of torch.distributed; `program/_run.py` has details."""
        return bind(self, device=device, order=order, counter=counter, progress=progress, transport=transport)
