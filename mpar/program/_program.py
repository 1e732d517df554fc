"""The program: an explicit list of instructions, the same for all ranks of a stage. Plain data: it is printed, proved, saved.

A value is one local tensor. An instruction reads values, makes values, and frees the values it is the last to read.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mpar.mesh import Mesh
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
    positions: tuple[tuple[str, ...], ...] = ()


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
