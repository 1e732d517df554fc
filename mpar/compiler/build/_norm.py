"""The global gradient norm, from the square sums of all gradients, and what it makes the update multiply gradients by."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mpar.compiler.build._position import Position
from mpar.compiler.build._report import widest
from mpar.compiler.build._writer import Writer
from mpar.compiler.segment import Code
from mpar.ops import constrain, sum_squares
from mpar.spec import P

__all__ = ["write_norm"]


def write_norm(position: Position, writer: Writer, grads: Mapping[str, list[int]]) -> tuple[int, int]:
    """`(global norm, clip factor)` of the gradients of all units; this part contributes those that it holds first."""
    blueprint, optimizer = position.blueprint, position.blueprint.optimizer
    assert optimizer is not None
    units = list(blueprint.placement.units.values())
    dtype = widest([blueprint.placement.precision.grad_dtype(leaf.dtype) for unit in units for _, leaf in unit.leaves])
    squares: list[int] = []
    contributed = [unit for unit in units if unit.path in position.units and position.holders(unit)[0] == position.number]
    for unit in contributed:
        code = _square_code(writer, grads[unit.path])
        squares += writer.emit("norm", code, grads[unit.path], [f"squares {unit.path}"] * len(code.out_specs), unit.path)
    chain_order = [(unit.path, leaf) for unit in units for leaf in range(len(unit.leaves))]
    vectors = [[(unit.path, leaf) for leaf in leaves] for unit in contributed for leaves in _square_sets(unit.grad)]
    vector = writer.spread("all squares", squares, vectors, chain_order, dtype, op="norm")

    def norm(squares: Tensor) -> tuple[Tensor, Tensor]:
        total = constrain(squares, P()).sum().sqrt()
        return total, optimizer.scale(total).to(torch.float64)

    args, specs = tuple(writer.values.globals([vector])), writer.values.specs([vector])
    code = writer.functions.compile("norm", norm, args, specs, [P(), P()])
    total, scale = writer.emit("norm", code, [vector], ["grad_norm", "scale"])
    return total, scale


def _square_sets(specs: Sequence[P]) -> list[list[int]]:
    """Positions of gradients by the mesh axes that shard them: their square sums are pending over those axes."""
    sets: dict[frozenset[str], list[int]] = {}
    for index, spec in enumerate(specs):
        sets.setdefault(spec.axes, []).append(index)
    return list(sets.values())


def _square_code(writer: Writer, grads: list[int]) -> Code:
    """One vector of square sums for each distinct set of axes that shards gradients of a unit."""
    specs = writer.values.specs(grads)
    sets = _square_sets(specs)

    def squares(values: list[Tensor]) -> list[Tensor]:
        return [torch.stack([sum_squares(values[i]) for i in positions]) for positions in sets]

    return writer.functions.compile("squares", squares, (writer.values.globals(grads),), specs, None)
