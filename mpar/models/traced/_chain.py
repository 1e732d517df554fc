"""TracedChain: a causal model whose blocks were traced, as a chain of segments."""

import functools
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from mpar import tree
from mpar.chain import Axes, Carry, Segment, context_of
from mpar.errors import ConfigError, DataError
from mpar.models._batch import BATCH_KEYS, ORDER, Batch, batch_weight, check_batch
from mpar.models._matrix import Matrix, joined_matrices
from mpar.models._model import Multiplications, Trainable
from mpar.models.traced import _runs as runs
from mpar.models.traced._attention import carried_axes
from mpar.models.traced._imported import Imported, imported
from mpar.models.traced._layout import Layout
from mpar.models.traced._matrices import traced_matrices
from mpar.models.traced._modules import ModuleSource
from mpar.models.traced._reading import Keys
from mpar.models.traced._segments import EmbedRun, HeadRun, LayerRun
from mpar.models.traced._skeleton import Source
from mpar.models.traced._traits import Traits
from mpar.tree import Tree

__all__ = ["TracedChain"]

_State = tuple[int, tuple[tuple[Keys[Tensor], ...], ...]]
RESIDUAL: Axes = ("batch", "residual_seq", "embed")


class TracedChain(Trainable):
    """A causal model whose blocks were traced. Its parameters have the names of its module; a path joins them with dots.

    traits: what the self-check has found its rows to allow.
    """

    dtype: torch.dtype
    traits: Traits

    @property
    @abstractmethod
    def source(self) -> Source | ModuleSource:
        """What it is made from."""

    @abstractmethod
    def with_traits(self, traits: Traits) -> "TracedChain":
        """The same model with other traits."""

    @property
    def imported(self) -> Imported:
        """What tracing has found."""
        return imported(self.source)

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""
        return self.imported.vocab_size

    @property
    def multiplications(self) -> Multiplications:
        """What a token is multiplied with."""
        found = self.imported
        matrices = {name for name, x in found.skeleton.parameters.items() if x.ndim > 1}
        read = {name for name in matrices if name not in found.embed} | (set(found.head) & matrices)
        leaves = {name: tree.leaves_with_path(tree.get(self.abstract_params, name)) for name in sorted(read)}
        weights = {f"{name}.{path}".rstrip("."): float(x.numel()) for name, parts in leaves.items() for path, x in parts}
        return Multiplications(weights, {f"layers.{i}": float(pairs) for i, pairs in enumerate(found.pairs)})

    @functools.cached_property
    def matrices(self) -> tuple[Matrix, ...]:  # type: ignore[override]
        """What tokens are multiplied with."""
        return joined_matrices(traced_matrices(self.imported))

    @functools.cached_property
    def abstract_params(self) -> Tree:
        """The parameter tree with meta tensors."""
        return self._tree(lambda _, layout: [torch.empty(leaf.shape, dtype=self.dtype, device="meta") for leaf in layout.leaves])

    @functools.cached_property
    def param_axes(self) -> Tree:
        """The parameter tree with the logical axes of each leaf."""
        return self._tree(lambda _, layout: [leaf.axes for leaf in layout.leaves])

    def leaves(self, stored: Mapping[str, Tensor]) -> Tree:
        """The parameter tree of tensors that have the names and shapes of those of transformers' module."""
        return self._tree(lambda name, layout: layout.cut(stored[name]))

    def _tree(self, of_parameter: Callable[[str, Layout], list[Any]]) -> Tree:
        root: dict[str, Any] = {}
        for name in self.imported.skeleton.parameters:
            leaves = of_parameter(name, self.imported.layouts[name])
            *keys, last = name.split(".")
            node = root
            for key in keys:
                node = node.setdefault(key, {})
            node[last] = leaves[0] if len(leaves) == 1 else {str(i): leaf for i, leaf in enumerate(leaves)}
        return root

    @property
    def batch_axes(self) -> dict[str, Axes]:
        """Every batch key that it reads: order (S,), all others (B, S); all but tokens and labels are optional.

        A model whose rows may not be permuted does not read order, and one that mixes documents does not read these.
        """
        rows: dict[str, Axes] = dict.fromkeys(self._row_keys, ("batch", "seq"))
        return rows if self.sequential else {**rows, ORDER: ("seq",)}

    @property
    def _row_keys(self) -> tuple[str, ...]:
        return tuple(key for key in BATCH_KEYS if self.traits.documents or key not in ("documents", "positions"))

    @property
    def sequential(self) -> bool:
        """Whether a layer reads the order of tokens from their places, so that its rows are never permuted."""
        return not self.traits.permutable

    @property
    def can_decode(self) -> bool:
        """Whether `decode` can go on from a state: whether layers read earlier tokens through attention only."""
        return self.traits.continues

    @functools.cached_property
    def segments(self) -> tuple[Segment, ...]:
        """What is before the layers, the layers, what follows them."""
        source, found = self.source, self.imported
        runs_of_kind = {kind: self._layer_run(kind) for kind in set(found.kinds)}
        body = [
            Segment(f"layers.{i}", run, (name,), RESIDUAL, carry)
            for i, (name, (run, carry)) in enumerate(
                zip(found.skeleton.names, map(runs_of_kind.__getitem__, found.kinds), strict=True)
            )
        ]
        first = Segment("embed", EmbedRun(source), found.embed, out_axes=RESIDUAL)
        return (first, *body, Segment("head", HeadRun(source, self.vocab_size), found.head))

    def _layer_run(self, kind: int) -> tuple[LayerRun, Carry | None]:
        run, windows, kv_heads = LayerRun(self.source, kind), self.imported.windows[kind], self.imported.kv_heads[kind]
        if not (self.traits.continues and windows):
            return run, None
        reach = max((window for window in windows if window is not None), default=None)
        return run, Carry(run.slice, tuple(map(carried_axes, kv_heads)), None if None in windows else reach)

    def context(self, batch: Batch, row_length: int | None = None) -> Mapping[str, Tensor]:
        """What segments read: the batch, positions (B or 1, S), and what layers are called with, such as tables of a rotation."""
        check_batch(batch, (*self._row_keys, ORDER), None, row_length)
        tokens, positions, order = batch["tokens"], batch.get("positions"), batch.get(ORDER)
        if positions is None:
            positions = (torch.arange(tokens.shape[1], device=tokens.device) if order is None else order)[None]
        positions = positions + self.traits.first_position
        _, called = runs.layer_calls(self.imported.skeleton, tokens, positions, torch.promote_types(self.dtype, torch.float32))
        return {**batch, **called, "positions": positions}

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        """The sum of the token_weights (default 1) of the tokens whose label is not -100: a scalar, float32 or wider."""
        return batch_weight(batch, torch.promote_types(self.dtype, torch.float32))

    @property
    def forbids_slices(self) -> str | None:
        """Why rows cannot be cut into slices; None if they can."""
        if self.traits.continues:
            return None
        return "it is traced, and a token reads earlier tokens of its row not only through attention."

    def apply(self, params: Tree, tokens_BS: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Logits (B, S, vocab_size) for each position's next token. `positions` (B, S) are 0, 1, ... by default.

        `documents` (B, S): tokens see their own document only; -1 is padding.
        """
        batch = {"tokens": tokens_BS, "positions": positions, "documents": documents}
        return self.logits(params, self.context({key: value for key, value in batch.items() if value is not None}))

    def logits(self, params: Tree, context: Mapping[str, Tensor]) -> Tensor:
        """Logits (B, S, vocab_size) of the tokens of a context."""
        *body, last = self.segments
        x: Any = None
        for segment in body:
            x, _ = segment.fn(_subtrees(segment, params), x, context, training=False)
        return last.fn.logits(_subtrees(last, params), x, context)[..., : self.vocab_size]  # type: ignore[attr-defined]

    def decode(self, params: Tree, tokens_BS: Tensor, state: object = None) -> tuple[Tensor, object]:
        """Logits (B, S, vocab_size) of tokens that follow those of `state`, and the state after them: the number of tokens so
        far, and for each layer the keys and values that later tokens can see.

        Without `state` the tokens are the first of their rows. Raises ConfigError unless `can_decode`.
        """
        if not self.can_decode:
            raise ConfigError(f"cannot go on from a state: this {self.name} model needs the whole row for each token; use apply")
        first, *layers, last = self.segments
        start, keys = cast(_State, state or (0, ((),) * len(layers)))
        order = torch.arange(start, start + tokens_BS.shape[1], device=tokens_BS.device)
        context = self.context({"tokens": tokens_BS, ORDER: order})
        x, _ = first.fn(_subtrees(first, params), None, context, training=False)
        after = []
        for segment, before in zip(layers, keys, strict=True):
            x, new = cast(LayerRun, segment.fn).decode(_subtrees(segment, params), x, context, before)
            after.append(new)
        logits = cast(HeadRun, last.fn).logits(_subtrees(last, params), x, context)[..., : self.vocab_size]
        return logits, (start + len(order), tuple(after))

    def loss(self, params: Tree, batch: Batch) -> tuple[Tensor, Tensor]:
        """`(sum of token_weight * cross-entropy in nats, weight)`, as `mpar.models.Model.loss`."""
        if "labels" not in batch:
            raise DataError(f"cannot compute a loss: the batch has {sorted(batch)}, no labels")
        context, x = self.context(batch), None
        losses: dict[str, Tensor] = {}
        for segment in self.segments:
            x, losses = segment.fn(_subtrees(segment, params), x, context_of(segment.name, context), training=True)
        return losses["loss"], self.weight(dict(batch))


def _subtrees(segment: Segment, params: Tree) -> tuple:
    return tuple(tree.get(params, path) for path in segment.paths)
