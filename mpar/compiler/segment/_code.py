"""What the compiler knows of code: kinds with the values that go in and come out, and a segment's forward and backward."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from mpar import tree
from mpar.compiler.segment._partition import RecomputePolicy
from mpar.ir import Kind
from mpar.kernels import Kernels
from mpar.mesh import Mesh
from mpar.sharding import LogicalGraph, RankGraph
from mpar.spec import P
from mpar.strategy import AxisTable
from mpar.tree import Tree

__all__ = ["Code", "SegmentCode", "SegmentSpecs", "Slices", "Target", "TracedSegment"]


@dataclass(frozen=True)
class Target:
    """What segments are compiled for: a mesh, the axes that shard each logical name, what backward computes again, a chip."""

    mesh: Mesh
    table: AxisTable
    recompute: RecomputePolicy
    kernels: Kernels


@dataclass(frozen=True)
class SegmentSpecs:
    """Where the leaves of a segment's parameters, of its x and of its context live, and those of the x that it returns."""

    params: tuple[P, ...]
    x: tuple[P, ...]
    context: tuple[P, ...]
    out: tuple[P, ...]


@dataclass(frozen=True)
class Code:
    """A compiled rank graph with what its neighbours must know: values without data and specs of operands and results.

    outputs: the structure of what the function returns. fallbacks: ops that every rank computes as a whole.
    """

    kind: Kind
    in_values: tuple[Tensor, ...]
    in_specs: tuple[P, ...]
    out_values: tuple[Tensor, ...]
    out_specs: tuple[P, ...]
    outputs: tree.Structure[Mapping[str, Tensor]] | None = None
    fallbacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class TracedSegment:
    """The joint graph: (parameters, x, context, cotangents) to (x, losses, metrics, gradients of parameters and x)."""

    logical: LogicalGraph
    x_out: tuple[Tensor, ...]
    x_structure: tree.Structure[Tree]
    losses: tuple[str, ...]
    metrics: tuple[str, ...]
    num_params: int
    num_x: int
    num_context: int

    @property
    def num_results(self) -> int:
        """Results of the forward that its neighbours read."""
        return len(self.x_out) + len(self.losses) + len(self.metrics)

    @property
    def num_primals(self) -> int:
        """Operands of the forward: parameters, x and context."""
        return self.num_params + self.num_x + self.num_context


@dataclass(frozen=True, eq=False)
class SegmentCode:
    """A segment compiled for a mesh.

    forward:  (parameters, x, context) -> (x, losses, metrics, kept).
    backward: (its part of those operands, kept, cotangents of x, cotangents of losses) -> gradients of parameters, then of x.
    joint:    where the forward gives losses only: both at once, (parameters, x, context, cotangents of losses) -> (losses,
              metrics, gradients of parameters, then of x). Nothing is kept between them, and what both need is made once.
    reads:    positions in (parameters, x, context) that the backward reads.
    ranked, target: what it was cut from, and for what; the backward may be cut further, see `split_segment`.
    """

    name: str
    traced: TracedSegment
    ranked: RankGraph
    target: Target
    forward: Code
    backward: Code
    joint: Code | None
    reads: tuple[int, ...]
    num_kept: int


Slices = Sequence[SegmentCode]
"""The code of a segment for each slice of a microbatch's rows; where slices see nothing of each other it is one."""
