"""Packed parameters: on a CPU the matrices of a model lie in memory as the products of a step read them.

They lie column by column where C++ multiplies a few rows with them, else those of bfloat16 in blocks of oneDNN. Matrices that are
multiplied with the same features lie side by side, as one. Parameters that come later stay as they are, unless in bfloat16.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mpar import tree
from mpar.chain import is_axes
from mpar.models import DeclaredModel, Trainable
from mpar.ops import few_rows_read_columns, lay_by_columns, lay_side_by_side, pack_matrices, pack_matrix
from mpar.program import Program

__all__ = ["Packing", "packings"]


@dataclass(frozen=True)
class Packing:
    """Parameters that are packed together, by their paths in the state.

    packed:     the function that packs them, and gives None where it cannot.
    num_summed: of matrices whose products are joined, how many of the first dims of each are summed; None for one matrix.
    """

    paths: tuple[str, ...]
    packed: Callable[[Sequence[Tensor]], Sequence[Tensor] | None]
    num_summed: int | None = None

    def __call__(self, leaves: Mapping[str, Tensor], *, stay: bool) -> dict[str, Tensor]:
        """The parameters for the state of programs. stay: that they are not trained, so that they are worth a copy. Those of
        bfloat16 are copied in any case: as they lie, their products take several times as long."""
        weights = [leaves[path] for path in self.paths]
        packed = self.packed(weights) if stay or weights[0].dtype == torch.bfloat16 else None
        if packed is None and stay and self.num_summed is not None:
            packed = lay_side_by_side(weights, self.num_summed)
        return dict(zip(self.paths, weights if packed is None else packed, strict=True))


def packings(model: Trainable, program: Program, rank: int) -> list[Packing]:
    """How the state of a rank is packed: the parameters whose products the program joins; and each matrix between which and the
    hidden features there are only products, or that is the output matrix, which the scores of texts and the embedding may read
    too. Programs must read them as they are stored, without a gather.

    Adapters leave the matrices that they are added to as they are, but for the norms of DoRA.
    """
    part = program.part(rank)
    moved = {value for step in part.instructions if step.op != "forward" for value in step.inputs}
    stored = {leaf.value: leaf.path for leaf in part.state_in if leaf.value not in moved}
    alone = dict(_only_multiplied(model, set(stored.values())))
    found = []
    for paths, num_summed in dict.fromkeys(_neighbours(program, rank, stored)):  # several instructions may read the same
        only_multiplied = all([alone.pop(path, None) for path in paths])
        packed = functools.partial(_pack_joined, num_summed=num_summed, only_multiplied=only_multiplied)
        found.append(Packing(paths, packed, num_summed))
    return [*found, *alone.values()]


def _neighbours(program: Program, rank: int, stored: Mapping[int, str]) -> Iterator[tuple[tuple[str, ...], int]]:
    """The paths of stored parameters whose products are joined, and how many of their first dims are summed."""
    for step in program.part(rank).instructions:
        for places, num_summed in program.kinds[step.kind].neighbours if step.kind in program.kinds else ():
            values = [step.inputs[place] for place in places]
            if all(value in stored for value in values):
                yield tuple(stored[value] for value in values), num_summed


def _only_multiplied(model: Trainable, stored: set[str]) -> Iterator[tuple[str, Packing]]:
    """By path, how each matrix is packed that is not joined with others."""
    plain = model.plain
    if not isinstance(plain, DeclaredModel):
        return
    axes = dict(tree.leaves_with_path(plain.param_axes, is_leaf=is_axes))
    for matrix in plain.matrices:
        for leaf in matrix.leaves:
            path, is_read = f"params.{leaf.path}", leaf.path in model.not_only_multiplied
            if matrix.kind in ("linear", "head") and "embed" in axes[leaf.path] and path in stored and not is_read:
                given = tuple(leaf.dims.index(name) for name in leaf.letters("given"))
                yield path, Packing((path,), functools.partial(_pack_one, given=given, keep=matrix.kind == "head"))


def _pack_joined(weights: Sequence[Tensor], *, num_summed: int, only_multiplied: bool) -> Sequence[Tensor] | None:
    """Matrices whose products are joined; None if nothing is gained."""
    if _lies_by_columns(weights[0]):
        return lay_by_columns(weights, range(num_summed))
    return pack_matrices(weights, num_summed) if only_multiplied else None


def _pack_one(weights: Sequence[Tensor], *, given: tuple[int, ...], keep: bool) -> Sequence[Tensor]:
    if _lies_by_columns(weights[0]):
        return lay_by_columns(weights, given)
    return [pack_matrix(weight, given, keep=keep) for weight in weights]


def _lies_by_columns(weight: Tensor) -> bool:
    """Whether products with a few rows read a matrix of this kind fastest column by column; it stays a plain tensor."""
    return weight.device.type == "cpu" and few_rows_read_columns(weight.dtype)
