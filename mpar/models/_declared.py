"""DeclaredModel: a decoder of known parts as a chain of segments, and functions that run all its segments in turn."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from mpar import tree
from mpar.chain import Axes, Segment, context_of
from mpar.errors import ConfigError, DataError, ShapeError
from mpar.models import decoder
from mpar.models._batch import BATCH_KEYS, ORDER, Batch, batch_weight, check_batch
from mpar.models._declared_matrices import declared_matrices
from mpar.models._matrix import Matrix, joined_matrices
from mpar.models._model import Model, Multiplications
from mpar.models.architectures import Architecture
from mpar.models.decoder import NEXT_KEYS, NEXT_WEIGHTS, BlockSegment, DecoderConfig, DecoderParams
from mpar.models.layers import DRAW, MoeConfig, State, Update, part_of, rope_tables, segment_numbers, table_keys

__all__ = ["DeclaredModel", "DecodeState"]

DecodeState = tuple[int, tuple[State | None, ...]]
"""How many tokens were decoded so far, and the state of each layer after them."""


@dataclass(frozen=True)
class DeclaredModel(Model):
    """A decoder-only language model of which mpar has a declaration.

    architecture: names and settings of its Hugging Face model type.
    """

    config: DecoderConfig
    dtype: torch.dtype
    architecture: Architecture = field(repr=False, hash=False)
    hf_config_json: str
    hf_generation_json: str | None = None

    @property
    def name(self) -> str:
        """The Hugging Face model type."""
        return self.architecture.name

    @property
    def vocab_size(self) -> int:
        """The number of tokens, without padding."""
        return self.config.vocab_size

    @functools.cached_property
    def abstract_params(self) -> DecoderParams[Tensor]:
        """The parameter tree with meta tensors; the vocabulary is padded."""
        return decoder.meta_params(self.config, self.dtype)

    @functools.cached_property
    def param_axes(self) -> DecoderParams[Axes]:
        """The parameter tree with the logical axes of each leaf."""
        return decoder.axes(self.config)

    @property
    def batch_axes(self) -> dict[str, Axes]:
        """Every batch key that it reads: order (S,), all others (B, S); all but tokens and labels are optional.

        A model with sequential layers does not read order: its rows are never permuted, however many ranks share them.
        """
        rows: dict[str, Axes] = dict.fromkeys(self._row_keys, ("batch", "seq"))
        return rows if self.sequential else {**rows, ORDER: ("seq",)}

    @functools.cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Embedding, blocks, head."""
        return decoder.segments(self.config)

    @property
    def updates(self) -> dict[str, Update]:
        """For the path of each parameter without gradient: how it is updated after a step."""
        updates = {}
        places = [(f"layers.{i}", f"layers.{i}", layer) for i, layer in enumerate(self.config.layers)]
        if self.config.multi_token is not None:
            places.append(("mtp", "mtp.block", self.config.multi_token.layer))
        for segment, path, layer in places:
            for config in layer.parts:
                part = part_of(config)
                for leaf, (metric, fn) in part.updates(config).items():
                    updates[f"{path}.{part.field}.{leaf}"] = (f"{segment}.{metric}", fn)
        return updates

    @property
    def forbids_microbatches(self) -> str | None:
        """Why the batch of a step cannot be cut into microbatches, and what to do instead; None if it can."""
        reasons = (part_of(part).forbids_microbatches(part) for layer in self.config.layers for part in layer.parts)
        return next((reason for reason in reasons if reason is not None), None)

    @property
    def forbids_slices(self) -> str | None:
        """Why rows cannot be cut into slices, and in some cases what to do instead; None if they can."""
        return self.config.forbids_slices

    @property
    def max_positions(self) -> int | None:
        """The longest row that the model can take. Only learned positions set a bound; without them it is None."""
        return self.config.num_positions

    @property
    def next_keys(self) -> tuple[str, ...]:
        """The batch keys besides tokens and labels that multi-token prediction needs; empty without it.

        `with_next_tokens` adds them to a batch.
        """
        return () if self.config.multi_token is None else NEXT_KEYS

    @property
    def _row_keys(self) -> tuple[str, ...]:
        keys = BATCH_KEYS if self.config.multi_token is None else (*BATCH_KEYS, *NEXT_KEYS, NEXT_WEIGHTS)
        return (*keys, DRAW) if self.config.drops else keys

    def with_dtype(self, dtype: torch.dtype) -> "DeclaredModel":
        """The same model with parameters of another dtype."""
        return replace(self, dtype=dtype)

    def without_multi_token(self) -> "DeclaredModel":
        """The same model without the layer that learns further tokens; its logits do not need that layer."""
        return replace(self, config=replace(self.config, multi_token=None))

    def with_logits_chunk(self, chunk: int | None) -> "DeclaredModel":
        """The same model, but its loss is computed for `chunk` tokens at a time; None: from all logits at once."""
        return replace(self, config=replace(self.config, logits_chunk=chunk))

    def with_mlp_chunk(self, chunk: int | None) -> "DeclaredModel":
        """The same model, but its feed-forward layers and shared experts compute `chunk` tokens at a time; None: all at once.

        Raises ConfigError if they have biases, or if the model has no such layers.
        """
        return replace(self, config=decoder.with_mlp_chunk(self.config, chunk))

    def context(self, batch: Batch, row_length: int | None = None) -> dict[str, Tensor]:
        """What segments read: RoPE tables, and all entries of `batch` but positions.

        Tables are (1, S, R/2); if `batch` has positions, they are (B, S, R/2). `order` (S,) gives for each index along S the
        position in its row of the token there; a batch has it if its rows are permuted, or if it is a slice of rows of
        `row_length` positions. Only for models that learn positions does the context hold positions. If a layer has side losses
        and the batch has labels, it holds weight, which side losses are multiplied by.
        Raises DataError, ShapeError, DtypeError or ConfigError.
        """
        check_batch(batch, (*self._row_keys, ORDER), self.max_positions, row_length)
        weights = [NEXT_WEIGHTS] if self.next_keys and "token_weights" in batch else []
        missing = [key for key in (*self.next_keys, *weights) if key not in batch]
        if missing and "labels" in batch:
            raise DataError(f"cannot learn further tokens from a batch without {missing}: models.with_next_tokens makes them")
        tokens, positions, order = batch["tokens"], batch.get("positions"), batch.get(ORDER)
        context = {key: value for key, value in batch.items() if key != "positions"}
        tables_dtype = torch.promote_types(self.dtype, torch.float32)
        for name, rope in self.config.ropes:
            tables = rope_tables(rope, tokens, positions, tables_dtype, order, row_length)
            context |= zip(table_keys(name), tables, strict=True)
        if self.config.num_positions is not None:
            if positions is None:
                positions = (torch.arange(tokens.shape[1], device=tokens.device) if order is None else order)[None]
            context["positions"] = positions
        if self.config.side_losses and "labels" in batch:
            context["weight"] = self.weight(batch)
        if DRAW in batch:
            context |= segment_numbers([segment.name for segment in self.segments], batch[DRAW])
        return context

    def weight(self, batch: Batch) -> Tensor:
        """The sum of the token_weights (default 1) of the tokens whose label is not -100: a scalar, float32 or wider."""
        return batch_weight(batch, torch.promote_types(self.dtype, torch.float32))

    def apply(  # type: ignore[override]  # it reads its own class of parameters
        self, params: DecoderParams[Tensor], tokens_BS: Tensor, positions: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """Logits (B, S, vocab_size) for each position's next token. `positions` (B, S) are 0, 1, ... by default.

        `documents` (B, S): tokens see their own document only; -1 is padding.
        """
        batch = {"tokens": tokens_BS, "positions": positions, "documents": documents}
        context = self.context({key: value for key, value in batch.items() if value is not None})
        *body, last = self.segments
        x, _ = _fold(body, params, context, training=False)
        return decoder.head_segment(self.config).logits(_subtrees(last, params), x)[..., : self.vocab_size]

    def decode(  # type: ignore[override]
        self, params: DecoderParams[Tensor], tokens_BS: Tensor, state: DecodeState | None = None
    ) -> tuple[Tensor, DecodeState]:
        """Logits (B, S, vocab_size) of tokens that follow those of `state`, and the state after them.

        Without `state` the tokens are the first of their rows. A state has the number of tokens so far, and an entry for each
        layer: the keys and values that later tokens can see, or the state of a scan, whose size does not grow.
        Raises ConfigError if a layer needs the whole row, or if a rotation depends on the length of the row.
        """
        if not self.config.can_decode:
            raise ConfigError(f"cannot go on from a state: this {self.name} model needs the whole row for each token; use apply")
        first, *blocks, last = (segment for segment in self.segments if segment.name != "mtp")
        start, layers = state or (0, (None,) * len(blocks))
        end = start + tokens_BS.shape[1]
        if self.max_positions is not None and end > self.max_positions:
            raise ShapeError(f"cannot go on to {end} tokens: this model has learned {self.max_positions} positions")
        order = torch.arange(start, end, device=tokens_BS.device)
        context = self.context({"tokens": tokens_BS, "positions": order.expand(tokens_BS.shape)}) | {ORDER: order}
        x, _ = _fold([first], params, context, training=False)
        after: list[State | None] = []
        for segment, before in zip(blocks, layers, strict=True):
            x, new = cast(BlockSegment, segment.fn).decode(_subtrees(segment, params), x, context, before)
            after.append(new)
        logits = decoder.head_segment(self.config).logits(_subtrees(last, params), x)[..., : self.vocab_size]
        return logits, (end, tuple(after))

    def loss(  # type: ignore[override]
        self, params: DecoderParams[Tensor], batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """`(sum of token_weight * cross-entropy in nats, weight)`, computed as in training; the loss is their quotient.

        `batch` has tokens and labels (already shifted: position s learns to give labels[s]); labels of -100 are not counted.
        """
        if "labels" not in batch:
            raise DataError(f"cannot compute a loss: the batch has {sorted(batch)}, no labels")
        _, losses = _fold(self.segments, params, self.context(batch), training=True)
        return losses["loss"], self.weight(batch)

    def init(self, seed: int, dtype: torch.dtype | None = None) -> DecoderParams[Tensor]:
        """Fresh parameters: matrices normal with the config's initializer_range, gains one, biases and padding zero.

        Every element depends only on `seed`, its path and its global index, so `init_leaf` gives the same values piecemeal.
        """
        like = self.abstract_params
        leaves = [self.init_leaf(seed, path).to(dtype or self.dtype) for path in tree.paths(like)]
        return tree.unflatten(tree.flatten(like)[1], leaves)

    def init_leaf(self, seed: int, path: str, slices: Sequence[slice] | None = None) -> Tensor:
        """The elements within `slices` (default: all) of the leaf at `path` of `init(seed)`; no others are made."""
        return decoder.init_leaf(self.config, self.dtype, seed, path, slices)

    @property
    def settings(self) -> DecoderConfig:
        """The config of the decoder."""
        return self.config

    @property
    def sequential(self) -> bool:
        """Whether a layer scans the sequence, so that its rows are never permuted."""
        return any(layer.sequential for layer in self.config.layers)

    @property
    def can_decode(self) -> bool:
        """Whether `decode` can go on from a state."""
        return self.config.can_decode

    @property
    def head_path(self) -> str:
        """Where the output matrix is among the parameters."""
        return "embed.table_VD" if self.config.tied else "head.head_DV"

    @property
    def multiplications(self) -> Multiplications:
        """What a token is multiplied with."""
        layers = {f"layers.{i}": layer for i, layer in enumerate(self.config.layers)}
        head = self.head_path
        weights = {head: float(self.config.vocab_size * self.config.hidden_size)}
        if self.config.multi_token is not None:
            layers["mtp"] = self.config.multi_token.layer
            weights[head] *= 2  # the layer for further tokens uses the same head a second time
        for path, leaf in tree.leaves_with_path(self.abstract_params):
            index = re.match(r"layers\.\d+|mtp", path)
            if index is None or leaf.ndim < 2 or "bias" in path:  # biases of heads have two dims
                continue
            mlp, names = layers[index[0]].mlp, tree.get(self.param_axes, path)
            share = mlp.top_k / mlp.num_experts if names[0] == "expert" and isinstance(mlp, MoeConfig) else 1.0
            weights[path] = leaf.numel() * share
        pairs = {name: float(sum(part_of(part).pairs(part) for part in layer.parts)) for name, layer in layers.items()}
        return Multiplications(weights, pairs)

    @functools.cached_property
    def matrices(self) -> tuple[Matrix, ...]:  # type: ignore[override]
        """What tokens are multiplied with."""
        return joined_matrices(declared_matrices(self))

    @property
    def hf_class(self) -> str:
        """The class in transformers that reads an export."""
        return self.architecture.hf_class

    @property
    def stored_names(self) -> dict[str, tuple[str, str]]:
        """For paths of leaves, where `{i}` is the index of a layer: (name of the stored tensor, transform)."""
        next_index = str(self.config.num_layers)  # of the first layer after the last one
        return {path: (name.replace("{n}", next_index), text) for path, (name, text) in self.architecture.names.items()}

    @property
    def base(self) -> str:
        """The prefix of all names of the decoder; checkpoints of a decoder without head may lack it."""
        return self.architecture.base

    @property
    def absent(self) -> tuple[str, ...]:
        """Patterns of old buffers, of layers for further tokens that the model does not have, and of the head of a tied model,
        which transformers ignores too."""
        names = [re.escape(name).replace(r"\{i\}", r"\d+") for name in self.architecture.absent]
        if self.config.tied:
            names.append(re.escape(self.architecture.names["head.head_DV"][0]))
        if self.architecture.layers_behind is not None:
            indices = "|".join(str(i) for i in range(self.config.num_layers))
            names.append(rf"{re.escape(self.base)}layers\.(?!(?:{indices})\.)\d+\..*")
        return tuple(names)

    @property
    def hf_keys(self) -> dict[str, int]:
        """The entry of config.json for the number of layers for further tokens; readers take it to be 1 if it is missing."""
        key = self.architecture.layers_behind
        return {} if key is None else {key: 0 if self.config.multi_token is None else 1}


def _subtrees(segment: Segment, params: DecoderParams[Tensor]) -> tuple:
    return tuple(tree.get(params, path) for path in segment.paths)


def _fold(
    segments: Sequence[Segment], params: DecoderParams[Tensor], context: dict[str, Tensor], *, training: bool
) -> tuple[Any, dict[str, Tensor]]:
    x: Any = None
    total: dict[str, Tensor] = {}
    for segment in segments:
        x, losses, *_ = segment.fn(_subtrees(segment, params), x, context_of(segment.name, context), training=training)
        for name, value in losses.items():
            total[name] = total[name] + value if name in total else value
    return x, total
