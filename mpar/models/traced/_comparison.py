"""Comparison: logits, gradients and what rows allow of a traced model, beside the module that it was traced from."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from mpar import tree
from mpar.models.traced._chain import TracedChain
from mpar.models.traced._find_traits import find_traits
from mpar.models.traced._traits import Traits
from mpar.tree import Tree

__all__ = ["compared"]

_LOGITS, _GRADIENTS = 1e-5, 1e-4
"""How much may differ, as a share of the largest logit, and of the largest gradient of a parameter."""


def compared(
    model: TracedChain,
    stored: Mapping[str, Tensor],
    logits: Callable[[Tensor], Tensor],
    tokens_BS: Tensor,
    other_first_position: int = 0,
) -> tuple[list[str], Traits]:
    """`(a line for everything in which the two differ, what rows allow)`.

    stored: the parameters of the module by name, which are written into. logits: what the module gives for tokens.
    other_first_position: where the model may count positions from, besides 0.
    """
    generator = torch.Generator().manual_seed(1)
    for x in stored.values():
        if x.ndim == 1:  # gains of one and biases of zero would hide what is done with them
            x.data += 0.1 * torch.randn(x.shape, generator=generator)
    params = tree.map_leaves(lambda x: x.detach().clone().requires_grad_(), model.leaves(stored))
    theirs_BSV = logits(tokens_BS)
    difference = _share(model.apply(params, tokens_BS), theirs_BSV)
    if not difference <= _LOGITS and other_first_position:
        shifted = model.with_traits(replace(model.traits, first_position=other_first_position))
        if _share(shifted.apply(params, tokens_BS), theirs_BSV) <= _LOGITS:
            model, difference = shifted, 0.0
    if not difference <= _LOGITS:
        return [f"logits differ by {difference:.1e} of the largest ({_LOGITS:.0e} is allowed)"], model.traits
    labels_BS = torch.randint(min(model.vocab_size, 128), tokens_BS.shape, generator=generator)
    problems = list(_gradients_that_differ(model, params, stored, theirs_BSV, {"tokens": tokens_BS, "labels": labels_BS}))
    with torch.no_grad():
        return problems, find_traits(model, params, logits, tokens_BS)


def _gradients_that_differ(
    model: TracedChain, params: Tree, stored: Mapping[str, Tensor], theirs_BSV: Tensor, batch: dict[str, Tensor]
) -> Iterator[str]:
    torch.nn.functional.cross_entropy(theirs_BSV.flatten(0, 1), batch["labels"].flatten(), reduction="sum").backward()
    loss, _ = model.loss(params, batch)
    loss.backward()
    largest = max(float(x.grad.abs().max()) for x in stored.values() if x.grad is not None)
    expected = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in stored.items()}
    wanted = dict(tree.leaves_with_path(model.leaves(expected)))
    for path, leaf in tree.leaves_with_path(params):
        given = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        difference = float((given - wanted[path]).abs().max()) / max(float(wanted[path].abs().max()), 1e-3 * largest)
        if not difference <= _GRADIENTS:
            yield f"the gradient of {path} differs by {difference:.1e} ({_GRADIENTS:.0e} is allowed)"


def _share(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).detach().abs().max() / theirs.detach().abs().max())
