"""The decoder-only transformer: embedding, layers of a mixer and a feed-forward layer, final norm and head.

Every model here is this function with another configuration (Touvron et al. 2023, arXiv:2302.13971, section 2.2, is the plain
one); what its layers are made of is said in `_parts.py`.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor

from mpar import ops
from mpar.chain import Carry, Segment
from mpar.errors import ConfigError
from mpar.models.decoder._multi_token import NEXT_WEIGHTS, MultiToken, MultiTokenConfig, multi_token_axes, multi_token_shapes
from mpar.models.layers._attention import AttentionConfig
from mpar.models.layers._feed_forward import MlpConfig
from mpar.models.layers._latent_attention import LatentAttentionConfig
from mpar.models.layers._norm import NormConfig, normalise
from mpar.models.layers._parts import apply_part, part_of
from mpar.models.layers._rope import Rope, depends_on_length
from mpar.models.layers.mamba._mamba import MambaConfig
from mpar.models.layers.moe._moe import MoeConfig
from mpar.tree import map_leaves, struct

__all__ = [
    "Block",
    "DecoderConfig",
    "DecoderParams",
    "Embed",
    "Head",
    "HeadSegment",
    "LayerConfig",
    "axes",
    "head_segment",
    "meta_params",
    "segments",
    "shapes",
    "with_mlp_chunk",
]

RESIDUAL = ("batch", "residual_seq", "embed")
BLOCK = ("batch", "seq", "embed")


@dataclass(frozen=True)
class LayerConfig:
    """One layer: its mixer of tokens, its feed-forward layer (None: it has none), and its norms.

    norms: where they stand: "pre", x + f(norm(x)); "post", x + norm(f(x)) (OLMo 2, arXiv:2501.00656, section 3.2); or "both".
    """

    mixer: AttentionConfig | LatentAttentionConfig | MambaConfig
    mlp: MlpConfig | MoeConfig | None
    norm: NormConfig = NormConfig()  # noqa: RUF009 (it is frozen)
    norms: Literal["pre", "post", "both"] = "pre"

    @property
    def parts(self) -> tuple[Any, ...]:
        """The configs of its parts, in order."""
        return (self.mixer,) if self.mlp is None else (self.mixer, self.mlp)

    @property
    def sequential(self) -> bool:
        """Whether its mixer goes from token to token, and cannot take them in another order."""
        return isinstance(self.mixer, MambaConfig)

    @property
    def side_losses(self) -> bool:
        """Whether a part has losses of its own, which need the batch's total token weight."""
        return any(getattr(part, "side_losses", False) for part in self.parts)


@dataclass(frozen=True)
class DecoderConfig:
    """Everything that the mathematics depends on.

    norm:            of the head. ropes: the rotations by name; mixers say which they use.
    embed_scale:     what embeddings are multiplied by, rounded to their dtype (Gemma: sqrt(hidden_size)).
    num_positions:   rows of a learned embedding of positions, None for none.
    logits_soft_cap: bound of the logits (Gemma 2, arXiv:2408.00118, section 2).
    vocab_multiple:  the vocabulary is padded inside to a multiple of it.
    multi_token:     the layer that learns the token after the next, None for none.
    logits_chunk:    None makes the logits at once, a number computes the loss from that many tokens at a time without keeping
                     them.
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    norm: NormConfig = NormConfig()  # noqa: RUF009 (it is frozen)
    ropes: tuple[tuple[str, Rope], ...] = ()
    initializer_range: float = 0.02
    tied: bool = False
    embed_scale: float | None = None
    num_positions: int | None = None
    logits_soft_cap: float | None = None
    multi_token: MultiTokenConfig | None = None
    vocab_multiple: int = 128
    logits_chunk: int | None = None

    def __post_init__(self) -> None:
        if self.logits_chunk is not None and self.logits_soft_cap is not None:
            raise ConfigError(
                f"cannot compute the loss from logits_chunk={self.logits_chunk} tokens at a time: this model bounds its logits "
                f"(soft cap {self.logits_soft_cap}), which the loss in chunks does not do. Use logits_chunk=None."
            )

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.layers)

    @property
    def side_losses(self) -> bool:
        """Whether any layer has losses of its own."""
        mtp = () if self.multi_token is None else (self.multi_token.layer,)
        return any(layer.side_losses for layer in (*self.layers, *mtp))

    @property
    def has_steps(self) -> bool:
        """Whether every layer can go on from a state, and no rotation of earlier tokens changes as the row grows."""
        fixed = not any(depends_on_length(rope) for _, rope in self.ropes)
        return fixed and all(part_of(layer.mixer).step is not None for layer in self.layers)

    @property
    def whole_rows(self) -> str | None:
        """Why rows cannot be cut into slices; None if they can."""
        mtp = () if self.multi_token is None else (self.multi_token.layer,)
        parts = [part for layer in (*self.layers, *mtp) for part in layer.parts]
        if any(part_of(layer.mixer).slice is None for layer in (*self.layers, *mtp)):
            return "a mixer of its layers needs whole rows."
        if len({layer.sequential for layer in self.layers}) > 1:
            return "it has layers that scan, whose positions have no order, beside others, which need it."
        looks = dict.fromkeys(option for part in parts for option in getattr(part, "of_all_tokens", ()))
        if looks:
            return (
                f"its routers look at all tokens of a microbatch, for {', '.join(looks)}.\n"
                "Use routers (model.router) without; the choice_bias of DeepSeek-V3 balances without a loss."
            )
        return None

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: the vocabulary, rounded up."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


@struct
class Embed:
    """The embedding of tokens; a row for each id, zero rows for padding. And that of positions, if they are learned."""

    table_VD: Tensor
    positions_SD: Tensor | None = None


@struct
class Block:
    """One layer. Its mixer is in the field that its part names; norms before and after each part are there where they stand."""

    attn_norm_D: Tensor | None = None
    attention: Any = None
    mlp_norm_D: Tensor | None = None
    mlp: Any = None
    attn_norm_bias_D: Tensor | None = None
    mlp_norm_bias_D: Tensor | None = None
    attn_post_norm_D: Tensor | None = None
    mlp_post_norm_D: Tensor | None = None
    attn_post_norm_bias_D: Tensor | None = None
    mlp_post_norm_bias_D: Tensor | None = None
    mamba: Any = None


@struct
class Head:
    """The final norm and the output matrix; the matrix is None where the embedding serves as such (tied)."""

    norm_D: Tensor
    head_DV: Tensor | None = None
    norm_bias_D: Tensor | None = None


@struct
class DecoderParams:
    """The parameter tree."""

    embed: Embed
    layers: tuple[Block, ...]
    head: Head
    mtp: MultiToken | None = None


def _norm_leaves(layer: LayerConfig, value: Any) -> dict[str, Any]:
    """`value` at every gain and bias that the norms of a layer have."""
    found = {}
    for label in ("attn", "mlp")[: len(layer.parts)]:
        for place, name in (("pre", f"{label}_norm"), ("post", f"{label}_post_norm")):
            if layer.norms in (place, "both"):
                found[f"{name}_D"] = value
                if layer.norm.bias:
                    found[f"{name}_bias_D"] = value
    return found


@functools.cache
def _block_shapes(layer: LayerConfig, hidden_size: int) -> Block:
    parts = {part_of(part).field: part_of(part).shapes(part, hidden_size) for part in layer.parts}
    return Block(**parts, **_norm_leaves(layer, (hidden_size,)))


@functools.cache
def _block_axes(layer: LayerConfig) -> Block:
    parts = {part_of(part).field: _where_present(part_of(part).axes, part_of(part).shapes(part, 1)) for part in layer.parts}
    return Block(**parts, **_norm_leaves(layer, ("embed",)))


def shapes(config: DecoderConfig) -> DecoderParams:
    """The parameter tree with a tuple of sizes for each leaf."""
    D, V, S = config.hidden_size, config.padded_vocab_size, config.num_positions
    embed = cast(Any, Embed)(table_VD=(V, D), positions_SD=None if S is None else (S, D))
    bias = (D,) if config.norm.bias else None
    head = cast(Any, Head)(norm_D=(D,), head_DV=None if config.tied else (D, V), norm_bias_D=bias)
    layers = tuple(_block_shapes(layer, D) for layer in config.layers)
    mtp = None if config.multi_token is None else multi_token_shapes(D, _block_shapes(config.multi_token.layer, D))
    return cast(Any, DecoderParams)(embed=embed, layers=layers, head=head, mtp=mtp)


_EMBED_AXES = cast(Any, Embed)(table_VD=("vocab", "embed"), positions_SD=(None, "embed"))
_HEAD_AXES = cast(Any, Head)(norm_D=("embed",), head_DV=("embed", "vocab"), norm_bias_D=("embed",))


def axes(config: DecoderConfig) -> DecoderParams:
    """The parameter tree with the logical axes of each leaf."""
    like = shapes(config)
    return cast(Any, DecoderParams)(
        embed=_where_present(_EMBED_AXES, like.embed),
        layers=tuple(_block_axes(layer) for layer in config.layers),
        head=_where_present(_HEAD_AXES, like.head),
        mtp=None if config.multi_token is None else multi_token_axes(_block_axes(config.multi_token.layer)),
    )


def _where_present(full: Any, like: Any) -> Any:
    """`full` with None wherever `like` has None."""
    if like is None or isinstance(like, tuple):
        return None if like is None else full
    return type(like)(**{name: _where_present(getattr(full, name), value) for name, value in vars(like).items()})


@dataclass(frozen=True)
class EmbedSegment:
    """Tokens to the residual stream."""

    scale: float | None = None

    def __call__(self, params: tuple[Embed], x: None, context: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """`x` is None; gives (B, S, D)."""
        (embed,) = params
        y_BSD = ops.constrain(ops.embedding(context["tokens"], embed.table_VD), RESIDUAL)
        if self.scale is not None:
            y_BSD = y_BSD * _rounded(self.scale, y_BSD.dtype)
        if embed.positions_SD is not None:
            positions = context["positions"]
            batch = None if positions.shape[0] == 1 else RESIDUAL[0]
            y_BSD = y_BSD + ops.constrain(ops.embedding(positions, embed.positions_SD), (batch, *RESIDUAL[1:]))
        return y_BSD, {}


@dataclass(frozen=True)
class BlockSegment:
    """One layer; equal settings are one kind to the compiler."""

    layer: LayerConfig

    def __call__(self, params: tuple[Block], x: Tensor, context: Mapping[str, Tensor]) -> tuple:
        """(B, S, D) to `((B, S, D), losses)`, or `((B, S, D), losses, metrics)` if a part has metrics."""
        x, _, *rest = self.slice(params, x, context, ())
        return x, *rest

    def slice(self, params: tuple[Block], x: Tensor, context: Mapping[str, Tensor], past: tuple) -> tuple:
        """The same for slices of rows, see `Carry`: what is left to later ones comes second."""
        losses: dict[str, Tensor] = {}
        metrics: dict[str, Tensor] = {}
        left = None

        def apply(own: Any, config: Any, normed: Tensor) -> Tensor:
            nonlocal left
            part = part_of(config)
            if part.slice is not None:
                y, left = part.slice(own, config, normed, context, past)
                return y
            y, more_losses, more_metrics = apply_part(own, config, normed, context)
            losses.update(more_losses)
            metrics.update(more_metrics)
            return y

        x = self._residual(params[0], x, apply)
        return (x, left, losses, metrics) if metrics else (x, left, losses)

    def step(self, params: tuple[Block], x: Tensor, context: Mapping[str, Tensor], state: Any) -> tuple[Tensor, Any]:
        """(B, S, D) of the tokens that follow those of `state` (None: the first of all) to (B, S, D) and the state after them."""
        left = state

        def apply(own: Any, config: Any, normed: Tensor) -> Tensor:
            nonlocal left
            part = part_of(config)
            if part.step is None:
                return apply_part(own, config, normed, context)[0]
            y, left = part.step(own, config, normed, context, left)
            return y

        x = self._residual(params[0], x, apply)
        return x, left

    def _residual(self, block: Block, x: Tensor, apply: Callable[[Any, Any, Tensor], Tensor]) -> Tensor:
        """`x` and what its parts add to it; `apply(parameters, config, normed x)` runs a part."""
        layer = self.layer
        for label, config in zip(("attn", "mlp"), layer.parts, strict=False):
            gain_D, bias_D = getattr(block, f"{label}_norm_D"), getattr(block, f"{label}_norm_bias_D")
            normed = x if gain_D is None else normalise(layer.norm, x, gain_D, bias_D, f"{label}_norm")
            normed = ops.constrain(normed, BLOCK)
            y = apply(getattr(block, part_of(config).field), config, normed)
            gain_D, bias_D = getattr(block, f"{label}_post_norm_D"), getattr(block, f"{label}_post_norm_bias_D")
            if gain_D is not None:
                y = ops.constrain(normalise(layer.norm, y, gain_D, bias_D, f"{label}_post_norm"), RESIDUAL)
            x = x + y
        return x


@dataclass(frozen=True)
class HeadSegment:
    """Final norm, output matrix, cross-entropy."""

    norm: NormConfig
    vocab_size: int
    logits_chunk: int | None
    soft_cap: float | None = None

    def __call__(self, params: tuple, x: Tensor, context: Mapping[str, Tensor]) -> tuple[None, dict[str, Tensor]]:
        """(B, S, D) to the sum of the losses of its tokens."""
        labels_BS, weights_BS = context["labels"], context.get("token_weights")
        if self.logits_chunk is None:
            loss, _ = ops.cross_entropy(self.logits(params, x), labels_BS, token_weights=weights_BS, vocab_size=self.vocab_size)
        else:
            loss, _ = ops.linear_cross_entropy(
                self._normed(params, x),
                _matrix_DV(params),
                labels_BS,
                token_weights=weights_BS,
                vocab_size=self.vocab_size,
                chunk=self.logits_chunk,
            )
        return None, {"loss": loss}

    def logits(self, params: tuple, x: Tensor) -> Tensor:
        """(B, S, D) to logits over the padded vocabulary."""
        normed = self._normed(params, x)
        if params[0].head_DV is None:
            logits_BSV = ops.einsum("bsd,vd->bsv", normed, params[1].table_VD)
        else:
            logits_BSV = ops.einsum("bsd,dv->bsv", normed, params[0].head_DV)
        if self.soft_cap is not None:
            logits_BSV = (logits_BSV / self.soft_cap).tanh() * self.soft_cap
        return ops.name(logits_BSV, "logits")

    def _normed(self, params: tuple, x: Tensor) -> Tensor:
        return ops.constrain(normalise(self.norm, x, params[0].norm_D, params[0].norm_bias_D, "final_norm"), BLOCK)


@dataclass(frozen=True)
class MultiTokenSegment:
    """The loss of the token after the next, beside the residual stream, which it hands on as it is."""

    block: BlockSegment
    head: HeadSegment
    weight: float

    def __call__(self, params: tuple, x: Tensor, context: Mapping[str, Tensor]) -> tuple:
        """(B, S, D) to `((B, S, D), losses)`, with metrics if the layer has some; without next_labels there is nothing to do.

        The loss is a sum over tokens, divided by the weight of all labels like the main one (arXiv:2412.19437, eq. 24). Positions
        without a next token have no loss; a router of the layer sends and counts them like others.
        """
        x, _, *rest = self.slice(params, x, context, ())
        return x, *rest

    def slice(self, params: tuple, x: Tensor, context: Mapping[str, Tensor], past: tuple) -> tuple:
        """The same for slices of rows, see `Carry`: what is left to later ones comes second."""
        if "next_labels" not in context:
            return x, None, {}
        y_BSD, embed, own_head = self.hidden(params, x, context), params[1], params[2]
        y_BSD, left, losses, *metrics = self.block.slice((params[0].block,), y_BSD, context, past)
        labels = {"labels": context["next_labels"]}
        if NEXT_WEIGHTS in context:
            labels["token_weights"] = context[NEXT_WEIGHTS]
        head = cast(Any, Head)(norm_D=params[0].norm_D, head_DV=own_head.head_DV)
        losses["mtp_loss"] = self.weight * self.head((head, embed), y_BSD, labels)[1]["loss"]
        return x, left, losses, *metrics

    def hidden(self, params: tuple, x: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        """What the further layer reads: the normed output of the decoder and the next token, joined."""
        own, embed, head = params
        norm = self.head.norm
        next_BSD = ops.constrain(ops.embedding(context["next_tokens"], embed.table_VD), RESIDUAL)
        x = normalise(norm, x, head.norm_D, head.norm_bias_D, "final_norm")
        next_BSD = ops.constrain(normalise(norm, next_BSD, own.embed_norm_D, None, "mtp_norm"), BLOCK)
        x = ops.constrain(normalise(norm, x, own.hidden_norm_D, None, "mtp_norm"), BLOCK)
        joined_BSD = ops.einsum("bsd,de->bse", next_BSD, own.embed_DD) + ops.einsum("bsd,de->bse", x, own.hidden_DD)
        return ops.constrain(joined_BSD, RESIDUAL)


def _rounded(value: float, dtype: torch.dtype) -> float:
    """`value` as `dtype` holds it."""
    fraction, exponent = math.frexp(value)
    bits = 1 - round(math.log2(torch.finfo(dtype).eps))
    return math.ldexp(round(math.ldexp(fraction, bits)), exponent - bits)


def _matrix_DV(params: tuple) -> Tensor:
    return params[1].table_VD.transpose(0, 1) if params[0].head_DV is None else params[0].head_DV


def head_segment(config: DecoderConfig) -> HeadSegment:
    """The last function of the chain, which also gives logits."""
    return HeadSegment(config.norm, config.vocab_size, config.logits_chunk, config.logits_soft_cap)


@functools.cache
def segments(config: DecoderConfig) -> tuple[Segment, ...]:
    """The chain; equal layers share one function object."""
    blocks = {layer: BlockSegment(layer) for layer in config.layers}
    mtp: tuple[Segment, ...] = ()
    if config.multi_token is not None:
        fn = MultiTokenSegment(BlockSegment(config.multi_token.layer), head_segment(config), config.multi_token.loss_weight)
        mtp = (Segment("mtp", fn, ("mtp", "embed", "head"), RESIDUAL, _carry(config.multi_token.layer, fn.slice)),)
    return (
        Segment("embed", EmbedSegment(config.embed_scale), ("embed",), RESIDUAL),
        *(
            Segment(f"layers.{i}", blocks[layer], (f"layers.{i}",), RESIDUAL, _carry(layer, blocks[layer].slice))
            for i, layer in enumerate(config.layers)
        ),
        *mtp,
        Segment("head", head_segment(config), ("head", "embed") if config.tied else ("head",)),
    )


def _carry(layer: LayerConfig, fn: Callable) -> Carry | None:
    """How a segment that has this layer goes from slice to slice, `fn` doing it; None if it cannot."""
    part = part_of(layer.mixer)
    return None if part.slice is None else Carry(fn, part.left_axes, part.reach(layer.mixer))


def with_mlp_chunk(config: DecoderConfig, chunk: int | None) -> DecoderConfig:
    """The same with feed-forward layers, shared experts too, that take `chunk` tokens at a time. Raises ConfigError."""
    layers = tuple(replace(layer, mlp=_with_chunk(layer.mlp, chunk)) for layer in config.layers)
    layered = [layer.mlp.shared if isinstance(layer.mlp, MoeConfig) else layer.mlp for layer in layers]
    if chunk is not None and not any(layered):
        raise ConfigError(f"cannot use mlp_chunk={chunk}: this model has no feed-forward layer that every token goes through")
    further = config.multi_token
    if further is not None:
        further = replace(further, layer=replace(further.layer, mlp=_with_chunk(further.layer.mlp, chunk)))
    return replace(config, layers=layers, multi_token=further)


def _with_chunk(mlp: Any, chunk: int | None) -> Any:
    if isinstance(mlp, MoeConfig):
        return replace(mlp, shared=_with_chunk(mlp.shared, chunk))
    return None if mlp is None else replace(mlp, chunk=chunk)


def meta_params(config: DecoderConfig, dtype: torch.dtype) -> DecoderParams:
    """The parameter tree with tensors that have no data."""
    return map_leaves(lambda shape: torch.empty(shape, dtype=dtype, device="meta"), shapes(config), is_leaf=is_sizes)


def is_sizes(x: Any) -> bool:
    """Whether `x` is a leaf of the tree that `shapes` gives."""
    return isinstance(x, tuple) and all(isinstance(size, int) for size in x)
