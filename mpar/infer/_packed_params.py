"""Packed parameters: on a CPU the matrices of a model lie in memory as the products of a step read them.

Matrices that are multiplied with the same features lie side by side, as one, and what is in bfloat16 is in blocks.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from mpar import tree
from mpar.chain import is_axes
from mpar.models import DeclaredModel, Trainable
from mpar.ops import lay_side_by_side, pack_matrix
from mpar.program import Program

__all__ = ["Packing", "packings"]


@dataclass(frozen=True)
class Packing:
    """Parameters that are packed together, by their paths in the state, and the function that packs them."""

    paths: tuple[str, ...]
    pack: Callable[[Sequence[Tensor]], Sequence[Tensor]]

    def __call__(self, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters for the state of programs."""
        return dict(zip(self.paths, self.pack([leaves[path] for path in self.paths]), strict=True))


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
    for paths, num_summed in _neighbours(program, rank, stored):
        in_blocks = all([alone.pop(path, None) for path in paths])
        found.append(Packing(paths, functools.partial(lay_side_by_side, num_summed=num_summed, in_blocks=in_blocks)))
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


def _pack_one(weights: Sequence[Tensor], *, given: tuple[int, ...], keep: bool) -> Sequence[Tensor]:
    return [pack_matrix(weight, given, keep=keep) for weight in weights]
