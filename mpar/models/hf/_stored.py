"""Which stored tensors the leaves of a model are made of, and which others a folder may hold.

That is in the `names` of its architecture; `_weight_map.py` says what can be written there.
"""

import re
from collections.abc import Mapping

from mpar import tree
from mpar.models._model import Model
from mpar.models.hf._weight_map import StoredLeaf, map_leaves_to_stored

__all__ = ["absent", "stored_leaves", "with_base"]


def stored_leaves(model: Model) -> dict[str, StoredLeaf]:
    """Path of each leaf to where it is stored."""
    shapes = {path: tuple(leaf.shape) for path, leaf in tree.leaves_with_path(model.abstract_params)}
    behind = str(model.config.num_layers)  # the index of the first layer behind the last one
    names = {path: (name.replace("{n}", behind), transform) for path, (name, transform) in model.architecture.names.items()}
    return map_leaves_to_stored(names, shapes, model.vocab_size)


def absent(model: Model) -> re.Pattern[str]:
    """Matches stored names that carry nothing: old buffers, and the head of a tied model, which transformers ignores too."""
    names = [re.escape(name).replace(r"\{i\}", r"\d+") for name in model.architecture.absent]
    if model.config.tied:
        names.append(re.escape(model.architecture.names["head.head_DV"][0]))
    if model.architecture.layers_behind is not None:
        ours = "|".join(str(i) for i in range(model.config.num_layers))
        names.append(rf"{re.escape(model.architecture.base)}layers\.(?!(?:{ours})\.)\d+\..*")
    return re.compile("|".join(names))


def with_base(where: Mapping[str, str], model: Model) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """`where` by full names; and full name -> name in the file, for a bare decoder's checkpoint, whose names lack their base."""
    base = model.architecture.base
    if any(name.startswith(base) for name in where):
        return where, {}
    stored = {base + name: name for name in where}
    return {name: where[old] for name, old in stored.items()}, stored
