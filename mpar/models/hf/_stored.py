"""Which stored tensors hold the leaves of a model, and which other tensors its folder may have.

The `names` of its architecture say so; `_weight_map.py` describes their format.
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
    next_index = str(model.config.num_layers)  # of the first layer after the last one
    names = {path: (name.replace("{n}", next_index), transform) for path, (name, transform) in model.architecture.names.items()}
    return map_leaves_to_stored(names, shapes, model.vocab_size)


def absent(model: Model) -> re.Pattern[str]:
    """Matches names of stored tensors that are not needed: old buffers, layers for further tokens that the model does not have,
    and the head of a tied model, which transformers ignores too."""
    names = [re.escape(name).replace(r"\{i\}", r"\d+") for name in model.architecture.absent]
    if model.config.tied:
        names.append(re.escape(model.architecture.names["head.head_DV"][0]))
    if model.architecture.layers_behind is not None:
        indices = "|".join(str(i) for i in range(model.config.num_layers))
        names.append(rf"{re.escape(model.architecture.base)}layers\.(?!(?:{indices})\.)\d+\..*")
    return re.compile("|".join(names))


def with_base(file_of_tensor: Mapping[str, str], model: Model) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """`(file of each tensor by its full name, name in the file by full name)`.

    In the checkpoint of a decoder without head, names in files lack the base of the architecture, which full names have. Where
    names in files are full, the second map is empty.
    """
    base = model.architecture.base
    if any(name.startswith(base) for name in file_of_tensor):
        return file_of_tensor, {}
    name_in_file = {base + name: name for name in file_of_tensor}
    return {name: file_of_tensor[short] for name, short in name_in_file.items()}, name_in_file
