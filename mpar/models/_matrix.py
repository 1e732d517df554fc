"""Matrices: the weights that tokens are multiplied with, by their names in Hugging Face, and the leaves that hold them.

A stored matrix may be several leaves (fused projections), and a leaf may be the matrices of all experts of a layer.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["Kind", "Matrix", "MatrixLeaf", "joined_matrices"]

Kind = Literal["linear", "embedding", "parameter", "head"]


@dataclass(frozen=True)
class MatrixLeaf:
    """A leaf of a matrix.

    path:   of the leaf. home: the same, but for a tied head the path that the head would have.
    dims:   a name for each dim of the leaf; those in `given` are multiplied with x, those in `result` are those of the product,
            and `expert` counts experts.
    given, result: how these dims are merged in the stored matrix: a text of `mpar.models.hf`, such as "(n h)".
    """

    path: str
    home: str
    dims: tuple[str, ...]
    given: str
    result: str
    expert: str | None = None

    def stored_order(self, side: str) -> tuple[str, ...]:
        """The dims of the leaf that a side, "given" or "result", has, in the order of the stored matrix: major first."""
        return tuple(re.findall(r"\w+", getattr(self, side)))

    def letters(self, side: str) -> tuple[str, ...]:
        """The dims of the leaf that a side, "given" or "result", has, in the order of the leaf."""
        words = re.findall(r"\w+", getattr(self, side))
        return tuple(name for name in self.dims if name in words)


@dataclass(frozen=True)
class Matrix:
    """A matrix of Hugging Face.

    name:     of its module; of a parameter that is no module's weight (experts, routers) the name of the parameter.
    kind:     "linear", "embedding", "parameter", or "head", which is the linear output embedding.
    transposed: whether it is stored as (given, result), as Conv1D of transformers does.
    segments: the segments that read it; None: all that read its leaves. It is not None where two matrices are tied.
    """

    name: str
    kind: Kind
    leaves: tuple[MatrixLeaf, ...]
    transposed: bool = False
    segments: tuple[str, ...] | None = None


def joined_matrices(parts: Iterable[Matrix]) -> tuple[Matrix, ...]:
    """The same matrices, those of one name as one with all their leaves."""
    joined: dict[str, Matrix] = {}
    for part in parts:
        known = joined.get(part.name)
        joined[part.name] = part if known is None else replace(known, leaves=(*known.leaves, *part.leaves))
    return tuple(joined.values())
