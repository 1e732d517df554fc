"""Packed parameters: on a CPU the matrices of a model lie in memory as the products of a step read them."""

from dataclasses import dataclass

from torch import Tensor

from mpar import tree
from mpar.chain import is_axes
from mpar.models import DeclaredModel, Trainable
from mpar.ops import pack_matrix
from mpar.program import Program

__all__ = ["Packing", "packings"]


@dataclass(frozen=True)
class Packing:
    """How a parameter is packed: the dims that its products sum over, and whether the plain matrix is kept for other readers."""

    given: tuple[int, ...]
    keep: bool

    def __call__(self, weight: Tensor) -> Tensor:
        """The parameter for the state of programs."""
        return pack_matrix(weight, self.given, keep=self.keep)


def packings(model: Trainable, program: Program, rank: int) -> dict[str, Packing]:
    """By path in the state: the matrices between which and the hidden features there are only products, and the output matrix,
    which the scores of texts and the embedding may read too. Programs must read them as they are stored, without a gather.

    Adapters leave the matrices that they are added to as they are, but for the norms of DoRA.
    """
    plain = model.plain
    if not isinstance(plain, DeclaredModel):
        return {}
    part = program.part(rank)
    moved = {value for step in part.instructions if step.op != "forward" for value in step.inputs}
    stored = {leaf.path for leaf in part.state_in if leaf.value not in moved}
    axes = dict(tree.leaves_with_path(plain.param_axes, is_leaf=is_axes))
    found = {}
    for matrix in plain.matrices:
        for leaf in matrix.leaves:
            path, is_read = f"params.{leaf.path}", leaf.path in model.not_only_multiplied
            if matrix.kind in ("linear", "head") and "embed" in axes[leaf.path] and path in stored and not is_read:
                given = tuple(leaf.dims.index(name) for name in leaf.letters("given"))
                found[path] = Packing(given, keep=matrix.kind == "head")
    return found
