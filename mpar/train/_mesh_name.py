"""Names of meshes: the axes with their sizes, outermost first, as in `pp2_fsdp2_tp2`. `one` is the mesh of a single rank."""

import difflib
import re
from dataclasses import fields

from mpar.errors import UnknownNameError
from mpar.train._config import MeshConfig

__all__ = ["MESH_EXAMPLES", "MESH_GRAMMAR", "mesh_by_name", "mesh_problem", "nearest_mesh_name"]

_AXES = tuple(field.name for field in fields(MeshConfig))
_ONE = "one"
_WORD = re.compile(r"([a-z]+)([1-9][0-9]*)")
MESH_GRAMMAR = f"axes with their sizes, joined by _ in the order {', '.join(_AXES)}, such as pp2_fsdp2_tp2; or {_ONE}"
MESH_EXAMPLES = (_ONE, "dp2", "fsdp4", "cp2_tp2", "dp2_fsdp2_tp2", "pp2_fsdp2_tp2")


def mesh_by_name(name: str) -> MeshConfig:
    """`MeshConfig(pp=2, tp=2)` for `pp2_tp2`. The order of axes is fixed, so `tp2_pp2` is refused.

    Raises UnknownNameError if the name is invalid; the error says why, and which valid name is nearest.
    """
    problem = mesh_problem(name)
    if problem:
        near = nearest_mesh_name(name)
        raise UnknownNameError(f"there is no mesh {name!r}: {problem}; did you mean {near}? A mesh is {MESH_GRAMMAR}.")
    return MeshConfig(**{axis: int(size) for axis, size in _WORD.findall("" if name == _ONE else name)})


def mesh_problem(name: str) -> str:
    """Why `name` is not the name of a mesh; an empty text if it is one."""
    if name == _ONE:
        return ""
    words = name.split("_")
    matches = [_WORD.fullmatch(word) for word in words]
    axes = [match[1] for match in matches if match is not None and match[1] in _AXES]
    strange = [word for word, match in zip(words, matches, strict=True) if match is None or match[1] not in _AXES]
    if strange:
        return f"{' and '.join(map(repr, strange))} {'are no axes' if len(strange) > 1 else 'is no axis'} with a size"
    if len(set(axes)) < len(axes):
        return "it has an axis twice"
    return "" if axes == sorted(axes, key=_AXES.index) else "its axes are not in order"


def nearest_mesh_name(name: str) -> str:
    """The valid name most like `name`: each word becomes the nearest axis; each axis comes once, in order."""
    sizes: dict[str, str] = {}
    for letters, digits in re.findall(r"([a-z]+)0*([0-9]*)", name.lower()):
        (axis,) = difflib.get_close_matches(letters, (*_AXES, _ONE), n=1, cutoff=0.0)
        sizes.setdefault(axis, digits or "2")
    return "_".join(axis + sizes[axis] for axis in _AXES if axis in sizes) or _ONE
