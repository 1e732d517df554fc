"""Segments of a traced model: what is before its layers, one layer, and what follows them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpar import ops
from mpar.models.traced import _runs as runs
from mpar.models.traced._imported import Imported, imported
from mpar.models.traced._modules import ModuleSource
from mpar.models.traced._reading import Keys, Reading
from mpar.models.traced._skeleton import Source
from mpar.tree import Tree

__all__ = ["EmbedRun", "HeadRun", "LayerRun"]


@dataclass(frozen=True)
class EmbedRun:
    """From tokens to what the first layer reads."""

    source: Source | ModuleSource

    def __call__(
        self, params: tuple, x: None, context: Mapping[str, Tensor], *, training: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`x` is None; gives (B, S, D)."""
        model = imported(self.source)
        weights = model.weights({name: name for name in model.embed}, dict(zip(model.embed, params, strict=True)))
        x_BSD = runs.embed(model.skeleton, weights, context["tokens"], context["positions"])
        return ops.constrain(x_BSD, ("batch", "residual_seq", "embed")), {}


@dataclass(frozen=True)
class LayerRun:
    """One layer. Layers that compute the same have the `index` of the first of them, so that they are compiled once."""

    source: Source | ModuleSource
    index: int

    def __call__(
        self, params: tuple[Tree], x: Tensor, context: Mapping[str, Tensor], *, training: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(B, S, D) to (B, S, D)."""
        return self._run(params, x, Reading(context, x.shape[0], x.shape[1])), {}

    def slice(
        self,
        params: tuple[Tree],
        x: Tensor,
        context: Mapping[str, Tensor],
        past: tuple[tuple[Keys[Tensor], ...], ...],
        *,
        training: bool,
    ) -> tuple[Tensor, tuple[Keys[Tensor], ...], dict[str, Tensor]]:
        """`__call__` for a slice of rows, see `Carry.fn`; keys and values are carried to later slices."""
        found = Reading(context, x.shape[0], x.shape[1], past)
        return self._run(params, x, found), tuple(found.carried), {}

    def decode(
        self, params: tuple[Tree], x: Tensor, context: Mapping[str, Tensor], state: tuple[Keys[Tensor], ...]
    ) -> tuple[Tensor, tuple[Keys[Tensor], ...]]:
        """`__call__` for tokens that follow those whose keys `state` has; and the keys that the next token needs."""
        found = Reading(context, x.shape[0], x.shape[1], state=state)
        return self._run(params, x, found), tuple(found.carried)

    def _run(self, params: tuple[Tree], x: Tensor, found: Reading) -> Tensor:
        model = imported(self.source)
        names = model.layer_names(self.index)
        stored = {name: f"{model.skeleton.names[self.index]}.{name}" for name in names}
        weights = model.weights(stored, {name: _at(params[0], name) for name in names})
        y = runs.layer(model.skeleton, self.index, weights, x, model.calls[self.index], found)
        return ops.constrain(y.to(x.dtype), ("batch", "residual_seq", "embed"))


@dataclass(frozen=True)
class HeadRun:
    """What follows the layers: logits, and the sum of the losses of all tokens."""

    source: Source | ModuleSource
    vocab_size: int

    def __call__(
        self, params: tuple, x: Tensor, context: Mapping[str, Tensor], *, training: bool
    ) -> tuple[None, dict[str, Tensor]]:
        """(B, S, D) to the sum of the losses of its tokens."""
        weights = context.get("token_weights")
        logits_BSV = self.logits(params, x, context)
        loss, _ = ops.cross_entropy(logits_BSV, context["labels"], token_weights=weights, vocab_size=self.vocab_size)
        return None, {"loss": loss}

    def token_losses(self, params: tuple, x: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        """(B, S, D) to the losses (B, S) of its tokens, in nats; 0 where the label is -100."""
        return ops.token_losses(self.logits(params, x, context), context["labels"], vocab_size=self.vocab_size)

    def token_logits(self, params: tuple, x: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        """(B, S, D) to logits (B, S, V)."""
        return self.logits(params, x, context)

    def logits(self, params: tuple, x: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        """(B, S, D) to logits (B, S, V)."""
        model: Imported = imported(self.source)
        weights = model.weights({name: name for name in model.head}, dict(zip(model.head, params, strict=True)))
        logits = runs.head(model.skeleton, weights, x, context["tokens"], context["positions"])
        return ops.name(logits.to(torch.promote_types(logits.dtype, x.dtype)), "logits")


def _at(tree: Any, name: str) -> Any:
    for key in name.split("."):
        tree = tree[key]
    return tree
