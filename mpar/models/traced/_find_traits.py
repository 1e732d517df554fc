"""Finding traits: a small model reads rows that are permuted, that hold two documents, or that come in parts."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from mpar.errors import MparError
from mpar.models.traced._chain import TracedChain
from mpar.models.traced._traits import Traits
from mpar.tree import Tree

__all__ = ["find_traits"]


_ALLOWED = 1e-4
_CUT = 5
"""Where the second document, or the second part, begins."""


def find_traits(model: TracedChain, params: Tree, logits: Callable[[Tensor], Tensor], tokens_BS: Tensor) -> Traits:
    """The traits of a model that computes what `logits` computes for whole rows in order."""
    whole_BSV = logits(tokens_BS)
    length = tokens_BS.shape[1]
    order = torch.arange(length).flip(0).roll(2)
    halves = [logits(part) for part in (tokens_BS[:, :_CUT], tokens_BS[:, _CUT:])]
    positions = torch.cat([torch.arange(_CUT), torch.arange(length - _CUT)]).expand(tokens_BS.shape)
    documents = (torch.arange(length) >= _CUT).to(torch.int64).expand(tokens_BS.shape)

    def permuted() -> Tensor:
        context = model.context({"tokens": tokens_BS[:, order], "order": order})
        return model.logits(params, context)[:, order.argsort()] - whole_BSV

    def packed() -> Tensor:
        return model.apply(params, tokens_BS, positions, documents) - torch.cat(halves, 1)

    def in_parts() -> Tensor:
        parts, state = [], None
        for part in tokens_BS.tensor_split((_CUT, _CUT + 1), 1):
            logits_BSV, state = model.decode(params, part, state)
            parts.append(logits_BSV)
        return torch.cat(parts, 1) - whole_BSV

    bound = _ALLOWED * float(whole_BSV.abs().max())
    return replace(
        model.traits,
        permutable=_within(permuted, bound),
        documents=_within(packed, bound),
        continues=_within(in_parts, bound),
    )


def _within(difference: Callable[[], Tensor], bound: float) -> bool:
    try:
        return float(difference().abs().max()) <= bound
    except (MparError, RuntimeError, IndexError):  # a run that fails for such rows does not allow them
        return False
