"""The global gradient norm, from sums of squares of all gradients; the factor by which the update scales them, and whether it is
skipped."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mpar.compiler.build._position import Position
from mpar.compiler.build._report import widest
from mpar.compiler.build._writer import Writer
from mpar.compiler.segment import Code
from mpar.ops import constrain, sum_squares
from mpar.optimizer import gradient_factor
from mpar.spec import P

__all__ = ["write_norm"]


def write_norm(
    position: Position, writer: Writer, grads: Mapping[str, list[int]], loss: int, limits: Sequence[int]
) -> tuple[int, int, int]:
    """Write the norm of all gradients.

    Returns the values `(global norm, factor that the update multiplies gradients by, whether the update is skipped)`. It is
    skipped if the loss or the norm is not finite or exceeds its limit; every rank computes that from the same values.

    loss:   the value of the mean loss of the batch.
    limits: the values of the largest loss and the largest norm with which the update is made.
    A unit that several positions along pp hold is counted by the first of them.
    """
    blueprint, optimizer = position.blueprint, position.blueprint.optimizer
    assert optimizer is not None
    units = list(blueprint.trained_units.values())
    dtype = widest([blueprint.placement.precision.grad_dtype(leaf.dtype) for unit in units for _, leaf in unit.leaves])
    squares: list[int] = []
    contributed = [unit for unit in units if unit.path in position.units and position.holders(unit)[0] == position.number]
    for unit in contributed:
        code = _square_code(writer, grads[unit.path])
        squares += writer.emit("norm", code, grads[unit.path], [f"squares {unit.path}"] * len(code.out_specs), unit.path)
    chain_order = [(unit.path, leaf) for unit in units for leaf in range(len(unit.leaves))]
    vectors = [[(unit.path, leaf) for leaf in leaves] for unit in contributed for leaves in _square_sets(unit.grad)]
    vector = writer.spread("all squares", squares, vectors, chain_order, dtype, op="norm")

    def norm(squares: Tensor, loss: Tensor, max_loss: Tensor, max_grad_norm: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total = constrain(squares, P()).sum().sqrt()
        # limits are finite, and a comparison with NaN is false, so only a finite norm is within its limit
        within = (loss.abs() < math.inf) & (loss <= max_loss) & (total <= max_grad_norm)
        return total, gradient_factor(optimizer, total).to(torch.float64), ~within

    operands = [vector, loss, *limits]
    args, specs = tuple(writer.values.globals(operands)), writer.values.specs(operands)
    code = writer.functions.compile("norm", norm, args, specs, [P(), P(), P()])
    total, scale, skip = writer.emit("norm", code, operands, ["grad_norm", "scale", "skip"])
    return total, scale, skip


def _square_sets(specs: Sequence[P]) -> list[list[int]]:
    """The indices of gradients that the same mesh axes shard, a list for each set of axes.

    The sum of squares of a shard is a pending sum over the axes that shard it, so only those of one set fit into one vector.
    """
    sets: dict[frozenset[str], list[int]] = {}
    for index, spec in enumerate(specs):
        sets.setdefault(spec.axes, []).append(index)
    return list(sets.values())


def _square_code(writer: Writer, grads: list[int]) -> Code:
    """Code that gives the sums of squares of a unit's gradients, in one vector for each distinct set of axes that shards them."""
    specs = writer.values.specs(grads)
    sets = _square_sets(specs)

    def squares(values: list[Tensor]) -> list[Tensor]:
        return [torch.stack([sum_squares(values[i]) for i in indices]) for indices in sets]

    return writer.functions.compile("squares", squares, (writer.values.globals(grads),), specs, None)
