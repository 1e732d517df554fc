"""Models with adapters of which each request has one: their parameters, and those of the base with each adapter merged."""

from mpar import adapters, tree
from mpar.adapters import AdapterBank, LoRA

__all__ = ["LORAS", "bank_params", "merged_params"]

LORAS = {
    "all": LoRA(rank=4, alpha=6, init="random"),
    "few": LoRA(rank=3, alpha=5, rslora=True, init="random", targets=r".*\.[01]\..*(q|kv?|v|kv_b|o|down|gate)\w*_proj|lm_head"),
    "head": LoRA(rank=2, init="random", targets=("embed_tokens", "lm_head")),
}
"""Adapters of unlike ranks, scales and targets; B is not zero, so each changes what the model answers."""


def bank_params(bank: AdapterBank, base: tree.Tree) -> tree.Tree:
    """The parameters of the bank with the weights of `base`, and the adapters that `init` gives each with a seed of its own."""
    alone = _alone(bank)

    def leaf(path):
        if path not in bank.leaves:
            return tree.get(base, path)
        return bank.joined(path, lambda name, inside: tree.get(alone[name], inside))

    return tree.unflatten(tree.flatten(bank.abstract_params)[1], [leaf(path) for path in tree.paths(bank.abstract_params)])


def merged_params(bank: AdapterBank, base: tree.Tree, name: str | None) -> tree.Tree:
    """The weights with this adapter added; None: the base."""
    if name is None:
        return base
    model = dict(bank.alone)[name]
    values = dict(tree.leaves_with_path(_alone(bank)[name])) | dict(tree.leaves_with_path(base))
    made = tree.unflatten(tree.flatten(model.abstract_params)[1], [values[path] for path in tree.paths(model.abstract_params)])
    return adapters.merge(model, made)


def _alone(bank: AdapterBank) -> dict[str, tree.Tree]:
    return {name: model.init(1 + number) for number, (name, model) in enumerate(bank.alone)}
