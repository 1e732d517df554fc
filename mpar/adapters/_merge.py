"""Merging: adapters added to the weights, and taken away from them; in float32 or wider, then in the dtype of the weights."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from mpar import tree
from mpar.adapters._model import AdaptedModel, with_adapters
from mpar.adapters._segment import low_rank
from mpar.errors import ConfigError
from mpar.tree import Tree

__all__ = ["can_merge", "merge", "merged_leaf", "unmerge"]

Read = Callable[[str], Tensor]
"""`fn(path)` gives a global leaf of an adapted model."""


def merge(model: AdaptedModel, params: Tree) -> Tree:
    """The parameters of `model.base` that compute what `params` compute: active adapters are added to the weights.

    Raises ConfigError for a weight that would not be finite, and for adapters of one of two tied matrices.
    """
    model.check_untied()

    def read(path: str) -> Tensor:
        return cast(Tensor, tree.get(params, path))

    like = model.base.abstract_params
    return tree.unflatten(tree.flatten(like)[1], [merged_leaf(model, path, read) for path in tree.paths(like)])


def unmerge(model: AdaptedModel, merged: Tree, params: Tree) -> Tree:
    """The parameters of `model` whose weights are `merged` without the active adapters, which `params` has.

    The opposite of `merge` up to rounding. Raises ConfigError for DoRA: its gain cannot be told from a merged weight.
    """
    model.check_untied()
    loras = dict(model.adapters)
    if any(loras[name].dora for name in model.active):
        raise ConfigError("cannot unmerge DoRA: the norm that it divided by was that of the weight; keep the weight instead")
    signed = {path: tree.get(params, path) for path in model.leaves}
    negative = {path: -x if path.endswith(".b") else x for path, x in signed.items()}

    def read(path: str) -> Tensor:
        return negative[path] if path in negative else cast(Tensor, tree.get(merged, path))

    like = model.base.abstract_params
    weights = tree.unflatten(tree.flatten(like)[1], [merged_leaf(model, path, read) for path in tree.paths(like)])
    return with_adapters(weights, signed)


def merged_leaf(model: AdaptedModel, path: str, read: Read) -> Tensor:
    """The leaf at `path` of `merge`; `read` gives those leaves that it is made of."""
    model.check_untied()
    weight = read(path)
    loras = dict(model.adapters)
    uses = [
        (name, adapted, leaf)
        for name in model.active
        for adapted in model.adapted[name]
        for leaf in adapted.matrix.leaves
        if leaf.path == path
    ]
    if not uses:
        return weight
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    for name, adapted, leaf in uses:
        wide = low_rank(wide, name, adapted, leaf, read, dora=loras[name].dora).tensor()
    made = wide.to(weight.dtype)
    if not made.isfinite().all():
        raise ConfigError(
            f"cannot merge {', '.join(name for name, _, _ in uses)} into {path}: it would hold values that are not finite"
        )
    return made


def can_merge(model: AdaptedModel) -> bool:
    """Whether active adapters can be added to the weights: none is of one of two tied matrices, which would change both."""
    return not model.tied
