"""Boundary: the values that exist before the first instruction of a part: state, batch and scalars."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mpar import tree
from mpar.compiler.build._position import Position
from mpar.compiler.build._units import Unit
from mpar.compiler.build._values import Values
from mpar.ir import STATE, Leaf, Piece
from mpar.spec import P, local_shape

__all__ = ["Boundary", "declare"]


SCALARS = ("lr", "step", "max_loss", "max_grad_norm")


@dataclass(frozen=True)
class Boundary:
    """The values that exist before the first instruction of a part.

    state, batch, scalars: their leaves.
    params:                for each unit, the values of its parameters.
    slots:                 for each unit and each slot of the optimizer, the values of that slot, for trained parameters that
                           have it.
    kept:                  for each segment that keeps state, the values of its leaves.
    batch_values:          for each piece, the values of its batch entries.

    The scalars are the learning rate, the number of the update, and the largest loss and gradient norm with which it is made.
    """

    state: list[Leaf]
    batch: list[Leaf]
    scalars: list[Leaf]
    params: dict[str, list[int]]
    slots: dict[str, list[list[int]]]
    kept: dict[int, list[int]]
    batch_values: dict[Piece, list[int]]


def declare(position: Position, values: Values) -> Boundary:
    """Add the values that exist before the first instruction of a part to `values`."""
    state, params, slots = _declare_state(position, values)
    kept = _declare_kept(position, values)
    state += [leaf for leaves in kept.values() for leaf in leaves]
    kept_values = {segment: [leaf.value for leaf in leaves] for segment, leaves in kept.items()}
    batch, batch_values = _declare_batch(position, values)
    scalars = [values.leaf(name, torch.empty((), dtype=torch.float64, device="meta"), P()) for name in SCALARS]
    return Boundary(state, batch, scalars, params, slots, kept_values, batch_values)


def _declare_state(position: Position, values: Values) -> tuple[list[Leaf], dict[str, list[int]], dict[str, list[list[int]]]]:
    """Add the parameters, then the slots of the optimizer; returns their leaves, and the values by unit."""
    leaves: list[Leaf] = []
    units: Mapping[str, Unit] = position.units
    optimizer = position.blueprint.optimizer

    def declare(prefix: str, unit: Unit, stored: Mapping[int, tuple[Tensor, P]]) -> list[int]:
        new = [values.leaf(f"{prefix}.{unit.paths[i]}", leaf, spec) for i, (leaf, spec) in stored.items()]
        leaves.extend(new)
        return [leaf.value for leaf in new]

    params = {
        path: declare("params", unit, {i: (leaf, unit.storage[i]) for i, (_, leaf) in enumerate(unit.leaves)})
        for path, unit in units.items()
    }
    slots: dict[str, list[list[int]]] = {path: [] for path in units}
    if optimizer is not None:
        for slot in optimizer.slots:
            for path, unit in position.trained_units.items():
                stored = {i: unit.slot(optimizer, slot, i) for i in unit.with_slot(optimizer, slot)}
                slots[path].append(declare(f"opt.{slot}", unit, stored))
    return leaves, params, slots


def _declare_kept(position: Position, values: Values) -> dict[int, list[Leaf]]:
    """Add the state that segments of this position keep from step to step; returns its leaves by segment."""
    blueprint, placement = position.blueprint, position.blueprint.placement
    model, kept = blueprint.model, dict[int, list[Leaf]]()
    for segment in (segment for stage in position.stages for segment in position.blueprint.pipeline.ranges[stage]):
        for place in blueprint.segments[segment].state:
            for inside, leaf in tree.leaves_with_path(tree.get(model.abstract_state, place)):
                path = f"{place}.{inside}" if inside else place
                spec = placement.strategy.compute_spec(tree.get(model.state_axes, path), placement.mesh)
                kept.setdefault(segment, []).append(values.leaf(f"{STATE}{path}", leaf, spec))
    return kept


def _declare_batch(position: Position, values: Values) -> tuple[list[Leaf], dict[Piece, list[int]]]:
    """Add every batch entry of every piece; returns their leaves, and the values by piece.

    The pieces of one entry are views of one tensor.
    """
    blueprint, placement = position.blueprint, position.blueprint.placement
    leaves: list[Leaf] = []
    by_piece: dict[Piece, list[int]] = {piece: [] for piece in blueprint.all_pieces}
    for key, x in placement.batch.items():
        spec, storage = placement.strategy.compute_spec(blueprint.model.batch_axes[key], placement.mesh), values.storage()
        of_slice: dict[int, int] = {}  # an entry with one dim, the order of positions, is shared by all microbatches
        for number, (piece, of_piece) in enumerate(by_piece.items()):
            if x.ndim > 1 or piece.microbatch == 0:
                leaves.append(values.leaf(f"{key}.{number}", x, spec, storage))
                of_slice[piece.slice] = leaves[-1].value
            of_piece.append(of_slice[piece.slice])
    assert all(local_shape(leaf.shape, leaf.spec, placement.mesh) == values[leaf.value].shape for leaf in leaves)
    return leaves, by_piece
