"""Step: what the parts of a step have in common, and what is there before its first instruction."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mpar.chain import Chain
from mpar.mesh import Mesh
from mpar.precision import Precision
from mpar.program._program import Leaf
from mpar.compiler.segment._compile import Code, Slices
from mpar.compiler.build._stages import Pipeline
from mpar.compiler.build._units import Unit
from mpar.compiler.build._writer import Writer
from mpar.spec import P, local_shape
from mpar.strategy import Strategy

__all__ = ["Step", "declare_batch", "declare_state"]


@dataclass(frozen=True)
class Step:
    """What all parts of one training step have in common.

    A microbatch is worked on in `num_slices` pieces, slices of its rows; pieces are numbered through. batch: of one piece.
    units: of the whole model, by path. codes: per segment, of every slice. reach: per segment, how many slices before its own one
    reads. boundary: per segment, leaves of the x that enters it, local and without data, with their specs.
    """

    model: Chain
    optimizer: Any | None
    strategy: Strategy
    mesh: Mesh
    precision: Precision
    batch: dict[str, Tensor]
    num_microbatches: int
    num_slices: int
    bucket_bytes: int
    prefetch_bytes: int
    offload: bool
    writer: Writer
    units: dict[str, Unit]
    context_code: Code
    weight_code: Code
    codes: list[Slices]
    reach: list[int]
    boundary: list[list[tuple[Tensor, P]]]
    pipeline: Pipeline

    def num_left(self, index: int) -> int:
        """Leaves that a slice of a segment leaves for later ones."""
        return len(self.codes[index][0].traced.x_out) - len(self.boundary[index + 1]) if self.reach[index] else 0

    @functools.cached_property
    def width(self) -> int:
        """Messages are numbered with room for this many leaves on each edge of the pipeline."""
        return self.num_slices * max(len(leaves) for leaves in self.boundary) or 1


def declare_state(step: Step, units: Mapping[str, Unit]) -> tuple[list[Leaf], dict[str, list[int]], dict[str, list[list[int]]]]:
    """Parameters, then the optimizer's slots: as leaves, and the values of each unit."""
    leaves: list[Leaf] = []

    def declare(prefix: str, unit: Unit, specs: list[P]) -> list[int]:
        new = [step.writer.leaf(f"{prefix}.{path}", leaf, spec) for (path, leaf), spec in zip(unit.leaves, specs, strict=True)]
        leaves.extend(new)
        return [leaf.value for leaf in new]

    params = {path: declare("params", unit, unit.storage) for path, unit in units.items()}
    slots: dict[str, list[list[int]]] = {path: [] for path in units}
    for slot in step.optimizer.slots if step.optimizer is not None else ():
        for path, unit in units.items():
            slots[path].append(declare(f"opt.{slot}", unit, unit.opt))
    return leaves, params, slots


def declare_batch(step: Step) -> tuple[list[Leaf], list[list[int]]]:
    """Every batch key of every piece, as leaves, and the values of each piece. The pieces of a key are views of one tensor."""
    leaves: list[Leaf] = []
    by_piece: list[list[int]] = [[] for _ in range(step.num_microbatches * step.num_slices)]
    for key, x in step.batch.items():
        spec, storage = step.strategy.compute_spec(step.model.batch_axes[key], step.mesh), step.writer.storage()
        shared: list[int] = []  # the order of positions, slice by slice, is that of all microbatches
        for piece, values in enumerate(by_piece):
            if x.ndim > 1 or piece < step.num_slices:
                leaves.append(step.writer.leaf(f"{key}.{piece}", x, spec, storage))
                shared.append(leaves[-1].value)
            values.append(shared[piece] if x.ndim > 1 else shared[piece % step.num_slices])
    assert all(local_shape(leaf.shape, leaf.spec, step.mesh) == step.writer.values[leaf.value].shape for leaf in leaves)
    return leaves, by_piece
