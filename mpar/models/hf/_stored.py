"""Which stored tensors hold the leaves of a model, and which other tensors its folder may have.

Its `stored_names` say so; `_weight_map.py` describes their format.
"""

import re
from collections.abc import Mapping

from mpar import tree
from mpar.models._model import Model
from mpar.models.hf._weight_map import StoredLeaf, map_leaves_to_stored

__all__ = ["absent", "stored_leaves", "with_base"]


def stored_leaves(model: Model) -> dict[str, StoredLeaf]:
    """For the path of each leaf where it is stored."""
    shapes = {path: tuple(leaf.shape) for path, leaf in tree.leaves_with_path(model.abstract_params)}
    return map_leaves_to_stored(model.stored_names, shapes, model.vocab_size)


def absent(model: Model) -> re.Pattern[str]:
    """Matches names of stored tensors that are not needed."""
    return re.compile("|".join(model.absent) or r"(?!)")


def with_base(file_of_tensor: Mapping[str, str], model: Model) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """`(file of each tensor by its full name, name in the file by full name)`.

    In the checkpoint of a decoder without head, names in files lack the base of the architecture, which full names have. Where
    names in files are full, the second map is empty.
    """
    base = model.base
    if not base or any(name.startswith(base) for name in file_of_tensor):
        return file_of_tensor, {}
    name_in_file = {base + name: name for name in file_of_tensor}
    return {name: file_of_tensor[short] for name, short in name_in_file.items()}, name_in_file
