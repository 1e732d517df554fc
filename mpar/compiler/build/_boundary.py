"""What is there before the first instruction of a part: state, batch and scalars."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mpar.compiler.build._position import Position
from mpar.compiler.build._units import Unit
from mpar.compiler.build._values import Values
from mpar.ir import Leaf, Piece
from mpar.spec import P, local_shape

__all__ = ["Boundary", "declare"]


@dataclass(frozen=True)
class Boundary:
    """Leaves, and the values of the parameters of each unit, of its slots (a list for each slot), of the batch of each piece."""

    state: list[Leaf]
    batch: list[Leaf]
    scalars: list[Leaf]
    params: dict[str, list[int]]
    slots: dict[str, list[list[int]]]
    batch_values: dict[Piece, list[int]]


def declare(position: Position, values: Values) -> Boundary:
    """Number the values that are there before the first instruction."""
    state, params, slots = _declare_state(position, values)
    batch, batch_values = _declare_batch(position, values)
    scalars = [values.leaf(name, torch.empty((), dtype=torch.float64, device="meta"), P()) for name in ("lr", "step")]
    return Boundary(state, batch, scalars, params, slots, batch_values)


def _declare_state(position: Position, values: Values) -> tuple[list[Leaf], dict[str, list[int]], dict[str, list[list[int]]]]:
    """Parameters, then the optimizer's slots: as leaves, and the values of each unit."""
    leaves: list[Leaf] = []
    units: Mapping[str, Unit] = position.units
    optimizer = position.blueprint.optimizer

    def declare(prefix: str, unit: Unit, specs: list[P]) -> list[int]:
        new = [values.leaf(f"{prefix}.{path}", leaf, spec) for (path, leaf), spec in zip(unit.leaves, specs, strict=True)]
        leaves.extend(new)
        return [leaf.value for leaf in new]

    params = {path: declare("params", unit, unit.storage) for path, unit in units.items()}
    slots: dict[str, list[list[int]]] = {path: [] for path in units}
    for slot in optimizer.slots if optimizer is not None else ():
        for path, unit in units.items():
            slots[path].append(declare(f"opt.{slot}", unit, unit.opt))
    return leaves, params, slots


def _declare_batch(position: Position, values: Values) -> tuple[list[Leaf], dict[Piece, list[int]]]:
    """Every batch key of every piece, as leaves, and the values of each piece. The pieces of a key are views of one tensor."""
    blueprint, placement = position.blueprint, position.blueprint.placement
    leaves: list[Leaf] = []
    by_piece: dict[Piece, list[int]] = {piece: [] for piece in blueprint.all_pieces}
    for key, x in placement.batch.items():
        spec, storage = placement.strategy.compute_spec(blueprint.model.batch_axes[key], placement.mesh), values.storage()
        of_slice: dict[int, int] = {}  # the order of positions, slice by slice, is that of all microbatches
        for number, (piece, of_piece) in enumerate(by_piece.items()):
            if x.ndim > 1 or piece.microbatch == 0:
                leaves.append(values.leaf(f"{key}.{number}", x, spec, storage))
                of_slice[piece.slice] = leaves[-1].value
            of_piece.append(of_slice[piece.slice])
    assert all(local_shape(leaf.shape, leaf.spec, placement.mesh) == values[leaf.value].shape for leaf in leaves)
    return leaves, by_piece
