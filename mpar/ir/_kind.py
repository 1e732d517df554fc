"""Kinds: the code of a segment, compiled once however often it is used, and what is known of it without running it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mpar.ir._memory import SegmentMemory

__all__ = ["CollectiveUse", "KernelUse", "Kind"]


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
class KernelUse:
    """Calls of a primitive in one segment that have the same implementation; `why` not a better one."""

    primitive: str
    implementation: str
    why: str
    calls: int


@dataclass(frozen=True)
class Kind:
    """A segment as code, compiled once however often it is used.

    source:     Python that defines `run(args, comm)`: takes its operands out of the list `args`, returns a tuple.
    constants:  tensors that the code refers to.
    operands / results: local shape and dtype of each.
    positions:  mesh axes along which the code asks for its rank's position.
    kernels:    what carries out its calls of primitives that have kernels.
    memory:     how storages come and go, for predicting memory.
    most:       the same where all rows come to one rank, if how many come is known at run time only.
    """

    name: str
    source: str
    constants: dict[str, Tensor]
    collectives: tuple[CollectiveUse, ...]
    flops: int
    bytes: int
    workspace: int
    memory: SegmentMemory
    num_nodes: int
    operands: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    results: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    positions: tuple[tuple[str, ...], ...]
    kernels: tuple[KernelUse, ...] = ()
    most: SegmentMemory | None = None
