"""Stored: the tensors of a checkpoint that hold a parameter of a module. transformers converts some while it reads.

What its conversion does is found by converting small tensors, whose elements are numbered. Only operations that move whole
elements of a parameter's first two dims are known to be found in this way.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mpar.errors import ConfigError
from mpar.models.traced._skeleton import load_conversions

__all__ = ["stored_names"]

_KNOWN = {"MergeModulelist", "SplitModulelist", "Concatenate", "Chunk"}


def stored_names(module: nn.Module, parameters: Mapping[str, Tensor]) -> dict[str, tuple[str, ...]]:
    """For each parameter the names of its stored tensors: those of its parts, along its second dim. A name with "{a}" stands for
    many tensors, one for each index of the parameter's first dim. Raises ConfigError for conversions of another kind.
    """
    mapping, loading = load_conversions()
    conversions = mapping.get_model_conversion_mapping(module, add_legacy=False)
    strange = {type(op).__name__ for each in conversions for op in getattr(each, "operations", ())} - _KNOWN
    if strange:
        raise ConfigError(
            f"checkpoints of {type(module).__name__} store tensors in another form, by {', '.join(sorted(strange))}"
        )
    numbered: dict[str, Tensor] = {}
    owners: list[str] = []
    for name, x in parameters.items():
        shape = (min(2, x.shape[0]), min(2, x.shape[1]), 1) if x.ndim == 3 else (1,) * x.ndim
        first = 4 * len(owners)
        numbered[name] = torch.arange(first, first + torch.Size(shape).numel()).reshape(shape)
        owners.append(name)
    found: dict[str, dict[int, str]] = {name: {} for name in parameters}
    for stored, x in loading.revert_weight_conversion(module, numbered).items():
        for element in x.flatten().tolist():
            found[owners[element // 4]][element % 4] = stored
    return {name: _pattern(name, elements, numbered[name]) for name, elements in found.items()}


def _pattern(name: str, elements: Mapping[int, str], numbered: Tensor) -> tuple[str, ...]:
    """elements: the stored tensor of each element of a parameter."""
    if len(set(elements.values())) == 1:
        return (elements[0],)
    experts, parts = numbered.shape[:2]
    names = []
    for part in range(parts):
        column = [re.split(r"(\d+)", elements[expert * parts + part]) for expert in range(experts)]
        texts = [{text} for text in column[0]] if len({len(words) for words in column}) == 1 else []
        for words in column:
            texts = [seen | {text} for seen, text in zip(texts, words, strict=True)]
        differing = [at for at, seen in enumerate(texts) if len(seen) > 1]
        if len(differing) != 1 or not all(text.isdigit() for text in texts[differing[0]]):
            raise ConfigError(f"cannot tell how checkpoints store {name}: in {', '.join(sorted(set(elements.values())))}")
        words = column[0]
        words[differing[0]] = "{a}"
        names.append("".join(words))
    return (names[0],) if len(set(names)) == 1 else tuple(names)
