"""The program as data: explicit lists of instructions, one for each position along pp. It is printed, proved, saved and run.

A value is one local tensor. An instruction reads values, makes values, and frees the values that no later instruction reads.
"""

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from mpar.ir._instruction import Instruction, Message, Piece
from mpar.ir._kind import Kind
from mpar.ir._part import Part
from mpar.ir._values import Leaf, Value
from mpar.kernels import Kernels
from mpar.mesh import Mesh
from mpar.optimizer import Optimizer
from mpar.schedules import Action

__all__ = ["Facts", "ProgramData"]


@dataclass(frozen=True)
class Facts:
    """What a program was compiled from, as far as people, ranks and proofs need to know it.

    optimizer:        the optimizer, whose learning rate the ranks follow; None: the program evaluates.
    mesh:             the mesh as the caller gave it, before axes were split.
    strategy:         the name of the strategy.
    context_parallel: how attention is divided among the ranks that share a sequence; None: no ranks share a sequence.
    refused:          the ways to divide attention that were tried and that this model or mesh does not allow.
    reduce:           "each": gradients are reduced after every microbatch; "last": after the last one.
    batch:            for each key, the global numbers of rows and of positions that a microbatch has.
    recompute:        the kind of the recompute policy.
    kernels:          the chip that kernels were chosen for, and how they were chosen.
    schedule:         the name of the schedule; "table" if its actions were given instead.
    stage_of:         the stage of each segment, by the segment's name, in the order of the chain.
    fallbacks:        the ops that every rank computes on global tensors because they have no sharding rule, sorted.
    frozen:           the paths of the parameters that training does not change, sorted.
    stands_for:       by path, how many parameters a leaf stands for, where that is not the number of its elements.
    """

    optimizer: Optimizer | None
    mesh: Mesh
    strategy: str
    context_parallel: str | None
    refused: tuple[str, ...]
    reduce: Literal["each", "last"]
    batch: Mapping[str, tuple[int, int]]
    recompute: str
    kernels: Kernels
    schedule: str
    stage_of: Mapping[str, int]
    fallbacks: tuple[str, ...]
    frozen: tuple[str, ...] = ()
    stands_for: Mapping[str, int] = field(default_factory=dict)


@dataclass
class ProgramData:
    """One step of every rank: of training, or of evaluation.

    mesh:        the mesh, in which an axis may have been split into `<axis>_outer` and `<axis>_inner`.
    values:      the values of all parts; the number of a value is its place in this list.
    kinds:       the code of all parts, by the name of the kind.
    parts:       the part of each position along pp.
    schedule:    for each position along pp its actions, in order.
    order_parts: into how many parts a sequence is cut before they are dealt out to the ranks that share it, see
                 `mpar.arrange.sequence_order`.
    num_slices:  into how many slices the rows of a microbatch are cut.
    """

    mesh: Mesh
    values: list[Value]
    kinds: dict[str, Kind]
    parts: list[Part]
    num_microbatches: int
    schedule: list[list[Action]]
    facts: Facts
    order_parts: int = 1
    num_slices: int = 1

    @functools.cached_property
    def pieces(self) -> list[Piece]:
        """The pieces of the batch, in the order in which they are numbered: microbatch by microbatch, in each slice by slice."""
        return [Piece(m, c) for m in range(self.num_microbatches) for c in range(self.num_slices)]

    @property
    def num_pieces(self) -> int:
        """The number of pieces of the batch."""
        return self.num_microbatches * self.num_slices

    def position(self, rank: int) -> int:
        """The position of a rank along pp."""
        return self.mesh.index(rank, ("pp",))

    def part(self, rank: int) -> Part:
        """The part that a rank runs."""
        return self.parts[self.position(rank)]

    def ranks_at(self, position: int) -> list[int]:
        """The ranks at one position along pp, ascending; they differ along the other mesh axes."""
        return [rank for rank in range(self.mesh.size) if self.position(rank) == position]

    @property
    def instructions(self) -> list[Instruction]:
        """The instructions of all parts, one part after the other."""
        return [instruction for part in self.parts for instruction in part.instructions]

    @property
    def state_in(self) -> list[Leaf]:
        """The state before a step, every path once. Where several parts hold a path, the leaf is that of the first of them."""
        return _once(leaf for part in self.parts for leaf in part.state_in)

    @property
    def state_out(self) -> list[Leaf]:
        """The state after a step, every path once like in `state_in`."""
        return _once(leaf for part in self.parts for leaf in part.state_out)

    @property
    def batch(self) -> list[Leaf]:
        """The entries of the batch, as the first part has them; every part has all keys."""
        return self.parts[0].batch

    @property
    def gradients(self) -> dict[str, int]:
        """By path, the value of each parameter's finished gradient on the first part that holds the parameter."""
        return {path: value for part in reversed(self.parts) for path, value in part.gradients.items()}

    def num_parameters(self) -> tuple[int, int]:
        """How many parameters are trained, and how many are frozen; codes of few bits count as what they stand for."""
        frozen, sizes = set(self.facts.frozen), [0, 0]
        for leaf in self.state_in:
            kind, _, path = leaf.path.partition(".")
            if kind == "params":
                sizes[path in frozen] += self.facts.stands_for.get(path, math.prod(leaf.shape))
        return sizes[0], sizes[1]

    def axes_used(self) -> list[tuple[str, ...]]:
        """Every tuple of mesh axes over which the code communicates or asks for its rank's coordinate, sorted."""
        axes_used = {use.axes for kind in self.kinds.values() for use in kind.collectives}
        axes_used |= {axes for kind in self.kinds.values() for axes in kind.coordinates}
        return sorted(axes_used)

    def messages(self) -> list[Message]:
        """Every message of a step, by number."""
        messages = [
            Message(
                instruction.message, position, instruction.peer, instruction.queue[-1], self.values[instruction.inputs[0]].bytes
            )
            for position, part in enumerate(self.parts)
            for instruction in part.instructions
            if instruction.op == "send"
        ]
        return sorted(messages, key=lambda message: message.number)


def _once(leaves: Iterable[Leaf]) -> list[Leaf]:
    """The first leaf of every path."""
    by_path: dict[str, Leaf] = {}
    for leaf in leaves:
        by_path.setdefault(leaf.path, leaf)
    return list(by_path.values())
