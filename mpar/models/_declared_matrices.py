"""The matrices of a declared model."""

import re
from collections.abc import Iterator, Sequence

from mpar.models._matrix import Matrix, MatrixLeaf
from mpar.models._model import Model
from mpar.models.hf import StoredLeaf, stored_leaves

__all__ = ["declared_matrices"]

_EXPERTS = re.compile(r"(.*\bexperts)\.\d+\.\w+\.weight")
_FUSED = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}


def declared_matrices(model: Model) -> Iterator[Matrix]:
    """The parts of its matrices, leaf by leaf."""
    names = {segment.name: segment.paths for segment in model.segments}
    tied = "embed" in names.get("head", ())
    for path, stored in stored_leaves(model).items():
        if stored.names[0].endswith("bias"):
            continue
        matrix = _of_stored(path, stored)
        if matrix is None:
            continue
        if path == "embed.table_VD" and tied:
            yield Matrix(matrix.name, "embedding", matrix.leaves, segments=("embed",))
            (leaf,) = matrix.leaves
            head = MatrixLeaf(path, "head.head_DV", leaf.dims, given=leaf.result, result=leaf.given)
            yield Matrix(model.stored_names["head.head_DV"][0].removesuffix(".weight"), "head", (head,), segments=("head",))
        else:
            yield matrix


def _of_stored(path: str, stored: StoredLeaf) -> Matrix | None:
    """The matrix of a declared leaf. In leaves the dims that are multiplied with x are first, as in x @ leaf."""
    dims = list(stored.transform.leaf)
    groups = [_text(names, joined=at == stored.transform.joined) for at, names in enumerate(stored.transform.stored)]
    name, expert = stored.names[0], None
    if stored.outer is not None:
        found, field = _EXPERTS.fullmatch(name), path.rpartition(".")[2].partition("_")[0]
        if found is None or field not in _FUSED:
            return None
        name, expert = f"{found[1]}.{_FUSED[field]}", "expert"
        dims.insert(stored.outer, expert)
        if field in ("gate", "up"):
            groups[0] = f"+{groups[0]}"
    elif len(groups) == 3 and re.fullmatch(r"\w+", groups[0]) and dims[0] == groups[0]:
        expert = groups.pop(0)
    if len(groups) != 2 or "1" in groups or len(dims) < 2:
        return None
    inner = [dim for dim in dims if dim != expert]
    given_first = inner[0] in re.findall(r"\w+", groups[0])
    given, result = groups if given_first else groups[::-1]
    leaf = MatrixLeaf(path, path, tuple(dims), given, result, expert)
    if path.startswith("embed."):
        return Matrix(name.removesuffix(".weight"), "embedding", (leaf,))
    if path == "head.head_DV":
        return Matrix(name.removesuffix(".weight"), "head", (leaf,))
    if expert is not None or "router" in path or not name.endswith(".weight"):
        return Matrix(name, "parameter", (leaf,), given_first and expert is None)
    return Matrix(name.removesuffix(".weight"), "linear", (leaf,), given_first)


def _text(names: Sequence[str], *, joined: bool) -> str:
    text = names[0] if len(names) == 1 else f"({' '.join(names)})"
    return f"+{text}" if joined else text
