"""Kinds: the code that instructions run, compiled once for all of them, and what is known of it without running it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mpar.ir._memory import SegmentMemory
from mpar.op_shape import AttentionShape, MatmulShape

__all__ = ["CollectiveUse", "KernelUse", "Kind", "OpUse", "Stretch"]


@dataclass(frozen=True)
class OpUse:
    """The calls of equal ops in one kind: what each costs, in which dtype it computes, its name if it is a primitive, and its
    shape if it is a product of matrices or attention."""

    flops: int
    bytes: int
    dtype: str
    name: str = ""
    transcendentals: int = 0
    matmul: MatmulShape | None = None
    attention: AttentionShape | None = None
    calls: int = 1


@dataclass(frozen=True)
class CollectiveUse:
    """One collective in the code of a kind.

    axes, size:   the mesh axes over which ranks take part, and how many ranks that are.
    bytes:        how many bytes one rank contributes, in how many `tensors`.
    line:         the line of the model that caused it.
    ragged:       only at run time is it known how many rows go to each rank, and so how many arrive.
    bound_bytes:  of a posted collective, the most bytes that a rank may contribute, which routing may decide; 0 if not posted.
    """

    op: str
    axes: tuple[str, ...]
    size: int
    bytes: int
    tensors: int
    line: str
    ragged: bool = False
    bound_bytes: int = 0


@dataclass(frozen=True)
class Stretch:
    """A part of the code of a kind in which no message is posted or waited for: it waits for the collectives `awaits`, runs
    `ops`, and posts the collectives `posts`; numbers are those of the kind's collectives."""

    awaits: tuple[int, ...] = ()
    ops: tuple[OpUse, ...] = ()
    posts: tuple[int, ...] = ()


@dataclass(frozen=True)
class KernelUse:
    """The calls of one primitive in one kind that run the same implementation; `why` says why no better one was chosen."""

    primitive: str
    implementation: str
    why: str
    calls: int


@dataclass(frozen=True)
class Kind:
    """The code of a segment or of a small function, such as a gather or an update.

    source:      Python that defines `run(args, comm)`, which takes its operands out of the list `args` and returns a tuple.
    constants:   tensors that the code refers to, by name.
    stretches:   its arithmetic and its memory traffic, op by op, between posting messages and waiting for them.
    workspace:   the most bytes that one of its ops allocates and frees while it runs.
    operands, results: local shape and dtype of each.
    coordinates: tuples of mesh axes for which the code asks for its rank's coordinate.
    kernels:     which implementations run its calls of primitives.
    memory:      which storages its ops make and drop; the forecast of memory is computed from it.
    memory_if_rows_meet: the same if a router sends all rows to one rank; None if routing decides no number of rows.
    overwrites:  the indices of the operands over which the code writes; nothing may read these values afterwards.
    neighbours:  groups of operands that are multiplied as one matrix if they lie side by side: their indices, and how many of the
                 first dims of each are rows.
    """

    name: str
    source: str
    constants: dict[str, Tensor]
    collectives: tuple[CollectiveUse, ...]
    stretches: tuple[Stretch, ...]
    workspace: int
    memory: SegmentMemory
    num_nodes: int
    operands: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    results: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    coordinates: tuple[tuple[str, ...], ...]
    kernels: tuple[KernelUse, ...] = ()
    memory_if_rows_meet: SegmentMemory | None = None
    overwrites: tuple[int, ...] = ()
    neighbours: tuple[tuple[tuple[int, ...], int], ...] = ()

    @property
    def ops(self) -> list[OpUse]:
        """All ops of one run."""
        return [op for stretch in self.stretches for op in stretch.ops]

    @property
    def flops(self) -> int:
        """FLOPs of one run."""
        return sum(op.calls * op.flops for op in self.ops)
