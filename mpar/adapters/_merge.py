"""Merging: adapters added to the weights, and taken away from them; in float32 or wider, then in the dtype of the weights."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from mpar import tree
from mpar.adapters._leaves import ADAPTERS, letters_of
from mpar.adapters._low_rank import Factor, LowRank
from mpar.adapters._model import AdaptedModel, with_adapters
from mpar.adapters._segment import letters_of_use, norm
from mpar.adapters._targets import Adapted
from mpar.errors import ConfigError
from mpar.models import MatrixLeaf
from mpar.tree import Tree

__all__ = ["base_params", "can_merge", "merge", "merged_leaf", "unmerge"]

Read = Callable[[str], Tensor]
"""`fn(path)` gives a global leaf of an adapted model."""


def merge(model: AdaptedModel, params: Tree) -> Tree:
    """The parameters of `model.base` that compute what `params` compute: active adapters are added to the weights.

    Raises ConfigError for a weight that would not be finite, and for adapters of one of two tied matrices.
    """
    check_untied(model)

    def read(path: str) -> Tensor:
        return cast(Tensor, tree.get(params, path))

    like = model.base.abstract_params
    return tree.unflatten(tree.flatten(like)[1], [merged_leaf(model, path, read) for path in tree.paths(like)])


def unmerge(model: AdaptedModel, merged: Tree, params: Tree) -> Tree:
    """The parameters of `model` whose weights are `merged` without the active adapters, which `params` has.

    The opposite of `merge` up to rounding. Raises ConfigError for DoRA: its gain cannot be told from a merged weight.
    """
    check_untied(model)
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
    check_untied(model)
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


def low_rank(weight: Tensor, name: str, adapted: Adapted, leaf: MatrixLeaf, read: Read, *, dora: bool) -> LowRank:
    """What stands for the adapted weight."""
    first = adapted.matrix.leaves[0]
    expert = () if leaf.expert is None else (leaf.expert,)
    of_weight, of_a, of_b, of_gain = letters_of_use(letters_of(leaf), expert, leaf.letters("given"), leaf.letters("result"))
    a = read(f"{ADAPTERS}.{name}.{first.home}.a").to(weight.dtype)
    b = read(f"{ADAPTERS}.{name}.{leaf.home}.b").to(weight.dtype)
    low = LowRank(weight, of_weight, Factor(a, of_a), Factor(b, of_b), adapted.scale)
    if not dora:
        return low
    magnitude = read(f"{ADAPTERS}.{name}.{leaf.home}.magnitude").to(weight.dtype)
    return LowRank(weight, of_weight, low.a, low.b, adapted.scale, Factor(magnitude / norm(low, of_gain), of_gain))


def can_merge(model: AdaptedModel) -> bool:
    """Whether active adapters can be added to the weights: none is of one of two tied matrices, which would change both."""
    return not _tied(model)


def check_untied(model: AdaptedModel) -> None:
    """Raise ConfigError unless `can_merge`."""
    if _tied(model):
        raise ConfigError(
            f"cannot merge the adapter of {', '.join(_tied(model))}: embedding and head of this {model.name} model are one "
            "tensor, and only one of them has the adapter.\n"
            "Keep the adapter as a folder of its own, or leave this module out of targets."
        )


def _tied(model: AdaptedModel) -> list[str]:
    matrices = (adapted.matrix for name in model.active for adapted in model.adapted[name])
    return [matrix.name for matrix in matrices if matrix.segments is not None]


def base_params(model: AdaptedModel, params: Tree) -> Tree:
    """The parameters of `model.base` in those of `model`, without any adapter."""
    like = model.base.abstract_params
    return tree.unflatten(tree.flatten(like)[1], [tree.get(params, path) for path in tree.paths(like)])
