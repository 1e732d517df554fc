"""The matrices of a traced model."""

import re
from collections.abc import Iterator

from torch import nn

from mpar.models._matrix import Kind, Matrix, MatrixLeaf
from mpar.models.traced._imported import Imported

__all__ = ["traced_matrices"]


def traced_matrices(found: Imported) -> Iterator[Matrix]:
    """Its matrices, whose leaves have the dims of the stored ones; the class of a module says which is multiplied with x."""
    for name, layout in found.layouts.items():
        shape = tuple(found.skeleton.parameters[name].shape)
        kind, given_first = _kind(found, name, len(shape))
        if kind is None:
            continue
        leaves = []
        for path, leaf in zip(layout.paths(name), layout.leaves, strict=True):
            left, _, right = leaf.transform(layout.joined).partition(" -> ")
            dims, groups = tuple(right.split()), re.findall(r"\+?\([^)]*\)|\+?\w+", left)
            expert = groups.pop(0) if len(groups) == 3 else None
            given, result = groups if given_first else groups[::-1]
            leaves.append(MatrixLeaf(path, path, dims, given, result, expert))
        module = name if kind == "parameter" else name.removesuffix(".weight")
        tied = [other for other, original in found.skeleton.tied.items() if original == name]
        if kind == "linear" and name in found.head:
            kind = "head"
        yield Matrix(
            module, kind, tuple(leaves), given_first and kind == "linear", ("embed",) if tied and kind == "embedding" else None
        )
        for other in tied if kind == "embedding" else ():
            (leaf_of,) = leaves
            head = MatrixLeaf(leaf_of.path, other, leaf_of.dims, given=leaf_of.result, result=leaf_of.given)
            yield Matrix(other.removesuffix(".weight"), "head", (head,), segments=("head",))


def _kind(found: Imported, name: str, ndim: int) -> tuple[Kind | None, bool]:
    """What a parameter is a matrix of, and whether the dim that is multiplied with x is stored before that of the result."""
    parent, _, field = name.rpartition(".")
    module = found.skeleton.module.get_submodule(parent)
    if ndim == 3 and "expert" in type(module).__name__.lower():
        return "parameter", bool(getattr(module, "is_transposed", False))
    if ndim != 2 or field != "weight":
        return None, False
    if isinstance(module, nn.Linear):
        return "linear", False
    if isinstance(module, nn.Embedding):
        return "embedding", True
    return ("linear", True) if type(module).__name__ == "Conv1D" else ("parameter", False)
