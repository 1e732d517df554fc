"""What the compiler knows of the code that it makes: its operands and results, and the forward and backward of a segment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from mpar import tree
from mpar.compiler.segment._partition import RecomputePolicy
from mpar.hardware import Hardware
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
    """What segments are compiled for.

    table:     the mesh axes that shard each logical axis.
    recompute: what a backward computes again instead of keeping it.
    kernels:   the chip, and how kernels are chosen for it.
    hardware:  by its times ops run while messages of the same segment travel; None: ops stay in the order in which they are
               written.
    """

    mesh: Mesh
    table: AxisTable
    recompute: RecomputePolicy
    kernels: Kernels
    hardware: Hardware | None = None


@dataclass(frozen=True)
class SegmentSpecs:
    """The specs of a segment's leaves: of its parameters, of the x that enters it, of its context, of the x that it returns."""

    params: tuple[P, ...]
    x: tuple[P, ...]
    context: tuple[P, ...]
    out: tuple[P, ...]


@dataclass(frozen=True)
class Code:
    """A compiled rank graph, with what those who call it must know of its operands and results.

    in_values, out_values: local tensors without data that look like the operands and results.
    in_specs, out_specs:   the specs of the operands and results.
    graph:                 the graph before its messages were hidden; None if the target's hardware hides none.
    joined:                the kinds whose work it does together; none if it was not joined.
    outputs:               the structure of what the function returns; None for a segment.
    fallbacks:             ops that every rank computes on global tensors; see `ReplicatedFallback`.
    """

    kind: Kind
    in_values: tuple[Tensor, ...]
    in_specs: tuple[P, ...]
    out_values: tuple[Tensor, ...]
    out_specs: tuple[P, ...]
    graph: fx.Graph | None = None
    joined: tuple[str, ...] = ()
    outputs: tree.Structure[Mapping[str, Tensor]] | None = None
    fallbacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class TracedSegment:
    """The joint graph of a segment: of its forward and of its backward at once, on global shapes.

    logical:         (parameters, x, context, cotangents) -> (x, losses, metrics, gradients of parameters, gradients of x);
                     without cotangents and gradients if nothing is differentiated.
    x_out:           tensors without data that look like the leaves of the x that the segment returns.
    x_structure:     the structure of that x.
    losses, metrics: their names, sorted: the order in which the graph returns them.
    num_state:       how many leaves at the end of x, and of the x that the segment returns, are its state.
    trained:         which leaves of the parameters get a gradient, as indices.
    active_x:        which leaves of x get a gradient: those that depend on a parameter that is trained.
    active_out:      which of the leaves of the x that it returns, and then of its losses, have a cotangent.
    """

    logical: LogicalGraph
    x_out: tuple[Tensor, ...]
    x_structure: tree.Structure[Tree]
    losses: tuple[str, ...]
    metrics: tuple[str, ...]
    num_params: int
    num_x: int
    num_context: int
    num_state: int = 0
    trained: tuple[int, ...] = ()
    active_x: tuple[int, ...] = ()
    active_out: tuple[int, ...] = ()

    @property
    def num_active_losses(self) -> int:
        """The number of losses that have a cotangent."""
        return sum(i >= len(self.x_out) for i in self.active_out)

    @property
    def has_gradients(self) -> bool:
        """Whether it was traced with gradients."""
        return bool(self.trained or self.active_x)

    @property
    def num_results(self) -> int:
        """The number of results of the forward: leaves of x, losses and metrics. Kept values do not count."""
        return len(self.x_out) + len(self.losses) + len(self.metrics)

    @property
    def num_primals(self) -> int:
        """The number of operands of the forward: leaves of parameters, x and context."""
        return self.num_params + self.num_x + self.num_context


@dataclass(frozen=True, eq=False)
class SegmentCode:
    """A segment compiled for a mesh.

    forward:  (parameters, x, context) -> (x, losses, metrics, kept values).
    backward: (operands of the forward that it reads, kept values, cotangents of x, cotangents of losses) -> (gradients of
              parameters, gradients of x), as far as the traced segment has them; None if it has no gradients.
    joint:    forward and backward as one, for a segment that returns losses but no x: (parameters, x, context, cotangents of
              losses) -> (losses, metrics, gradients of parameters, gradients of x). It keeps nothing, and computes once what
              forward and backward both need. None for other segments, and without gradients.
    reads:    which operands of the forward the backward reads, as indices into (parameters, x, context).
    num_kept: the number of kept values.
    ranked:   the rank graph of which forward and backward were cut; `split_segment` cuts the backward further.
    target:   what the segment was compiled for.
    """

    name: str
    traced: TracedSegment
    ranked: RankGraph
    target: Target
    forward: Code
    backward: Code | None
    joint: Code | None
    reads: tuple[int, ...]
    num_kept: int

    @property
    def halves(self) -> tuple[Code, ...]:
        """The forward, and the backward if there is one."""
        return (self.forward,) if self.backward is None else (self.forward, self.backward)


Slices = Sequence[SegmentCode]
"""The code of a segment for each slice of a microbatch. Slices that read nothing of earlier ones all have the same code."""
