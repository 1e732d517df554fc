"""The decoder-only transformer: embedding, pre-norm blocks of attention and feed-forward layer, final norm and head.

Llama, Qwen2, Qwen3 and Starcoder2 are this function with different configurations
(Touvron et al. 2023, arXiv:2302.13971, section 2.2).
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from mpar import ops
from mpar.chain import Segment
from mpar.models._attention import ATTENTION_AXES, Attention, attend
from mpar.models._feed_forward import FEED_FORWARD_AXES, FeedForward, feed_forward
from mpar.models._rope import Rope
from mpar.tree import map_leaves, struct

__all__ = [
    "Block",
    "DecoderConfig",
    "DecoderParams",
    "Embed",
    "Head",
    "HeadSegment",
    "axes",
    "head_segment",
    "meta_params",
    "segments",
    "shapes",
]

RESIDUAL = ("batch", "residual_seq", "embed")
BLOCK = ("batch", "seq", "embed")


@dataclass(frozen=True)
class DecoderConfig:
    """Everything that the mathematics depends on. `windows` has one entry per layer: positions seen, or None for all.

    `vocab_multiple`: the vocabulary is padded inside to a multiple of it. `logits_chunk`: None makes the logits at once,
    a number computes the loss from that many tokens at a time without keeping them. `norm`: "rms_norm" | "layer_norm", of
    blocks and head; the norms of single heads (`qk_norm`) are always RMS norms. `gated`: see `FeedForward`.
    """

    vocab_size: int
    hidden_size: int
    mlp_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    windows: tuple[int | None, ...]
    rope: Rope
    activation: str = "silu"
    gated: bool = True
    norm: str = "rms_norm"
    norm_bias: bool = False
    norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    vocab_multiple: int = 128
    logits_chunk: int | None = None

    @property
    def num_layers(self) -> int:
        """The number of blocks."""
        return len(self.windows)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: the vocabulary, rounded up."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


@struct
class Embed:
    """The embedding of tokens; a row for each id, zero rows for padding."""

    table_VD: Tensor


@struct
class Block:
    """One layer."""

    attn_norm_D: Tensor
    attention: Attention
    mlp_norm_D: Tensor
    mlp: FeedForward
    attn_norm_bias_D: Tensor | None = None
    mlp_norm_bias_D: Tensor | None = None


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


def shapes(config: DecoderConfig) -> DecoderParams:
    """The parameter tree with a tuple of sizes for each leaf."""
    D, F, V = config.hidden_size, config.mlp_size, config.padded_vocab_size
    N, K, H = config.num_heads, config.num_kv_heads, config.head_size
    qkv, qk, mlp = config.qkv_bias, config.qk_norm, config.mlp_bias
    attention = cast(Any, Attention)(
        q_DNH=(D, N, H),
        k_DKH=(D, K, H),
        v_DKH=(D, K, H),
        o_NHD=(N, H, D),
        q_bias_NH=(N, H) if qkv else None,
        k_bias_KH=(K, H) if qkv else None,
        v_bias_KH=(K, H) if qkv else None,
        o_bias_D=(D,) if config.o_bias else None,
        q_norm_H=(H,) if qk else None,
        k_norm_H=(H,) if qk else None,
    )
    feed_forward = cast(Any, FeedForward)(
        gate_DF=(D, F) if config.gated else None,
        up_DF=(D, F),
        down_FD=(F, D),
        gate_bias_F=(F,) if mlp and config.gated else None,
        up_bias_F=(F,) if mlp else None,
        down_bias_D=(D,) if mlp else None,
    )
    bias = (D,) if config.norm_bias else None
    block = cast(Any, Block)(
        attn_norm_D=(D,),
        attention=attention,
        mlp_norm_D=(D,),
        mlp=feed_forward,
        attn_norm_bias_D=bias,
        mlp_norm_bias_D=bias,
    )
    head = cast(Any, Head)(norm_D=(D,), head_DV=None if config.tied else (D, V), norm_bias_D=bias)
    return cast(Any, DecoderParams)(embed=cast(Any, Embed)(table_VD=(V, D)), layers=(block,) * config.num_layers, head=head)


AXES = {
    "embed": cast(Any, Embed)(table_VD=("vocab", "embed")),
    "block": cast(Any, Block)(
        attn_norm_D=("embed",),
        attention=ATTENTION_AXES,
        mlp_norm_D=("embed",),
        mlp=FEED_FORWARD_AXES,
        attn_norm_bias_D=("embed",),
        mlp_norm_bias_D=("embed",),
    ),
    "head": cast(Any, Head)(norm_D=("embed",), head_DV=("embed", "vocab"), norm_bias_D=("embed",)),
}


def axes(config: DecoderConfig) -> DecoderParams:
    """The parameter tree with the logical axes of each leaf."""
    like = shapes(config)
    block = _where_present(AXES["block"], like.layers[0])
    return cast(Any, DecoderParams)(
        embed=AXES["embed"], layers=(block,) * config.num_layers, head=_where_present(AXES["head"], like.head)
    )


def _where_present(full: Any, like: Any) -> Any:
    """`full` with None wherever `like` has None."""
    if like is None or isinstance(like, tuple):
        return None if like is None else full
    return type(like)(**{name: _where_present(getattr(full, name), value) for name, value in vars(like).items()})


@dataclass(frozen=True)
class EmbedSegment:
    """Tokens to the residual stream."""

    def __call__(self, params: tuple[Embed], x: None, context: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """`x` is None; gives (B, S, D)."""
        (embed,) = params
        return ops.constrain(ops.embedding(context["tokens"], embed.table_VD), RESIDUAL), {}


@dataclass(frozen=True)
class BlockSegment:
    """One layer; equal settings are one kind to the compiler."""

    activation: str
    norm: str
    norm_eps: float
    window: int | None

    def __call__(self, params: tuple[Block], x: Tensor, context: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """(B, S, D) to (B, S, D)."""
        (block,) = params
        normed = self._normed(x, block.attn_norm_D, block.attn_norm_bias_D, "attn_norm")
        x = x + attend(block.attention, normed, context, window=self.window, norm_eps=self.norm_eps)
        normed = self._normed(x, block.mlp_norm_D, block.mlp_norm_bias_D, "mlp_norm")
        return x + feed_forward(block.mlp, normed, activation=self.activation), {}

    def _normed(self, x: Tensor, weight_D: Tensor, bias_D: Tensor | None, label: str) -> Tensor:
        return _normalise(self.norm, x, weight_D, bias_D, self.norm_eps, label)


@dataclass(frozen=True)
class HeadSegment:
    """Final norm, output matrix, cross-entropy."""

    norm: str
    norm_eps: float
    vocab_size: int
    logits_chunk: int | None

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
            return ops.name(ops.einsum("bsd,vd->bsv", normed, params[1].table_VD), "logits")
        return ops.name(ops.einsum("bsd,dv->bsv", normed, params[0].head_DV), "logits")

    def _normed(self, params: tuple, x: Tensor) -> Tensor:
        return _normalise(self.norm, x, params[0].norm_D, params[0].norm_bias_D, self.norm_eps, "final_norm")


def _normalise(kind: str, x: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float, label: str) -> Tensor:
    if kind == "layer_norm":
        y = ops.layer_norm(x, weight_D, bias_D, eps=eps)
    else:
        assert kind == "rms_norm" and bias_D is None
        y = ops.rms_norm(x, weight_D, eps=eps)
    return ops.constrain(ops.name(y, label), BLOCK)


def _matrix_DV(params: tuple) -> Tensor:
    return params[1].table_VD.transpose(0, 1) if params[0].head_DV is None else params[0].head_DV


def head_segment(config: DecoderConfig) -> HeadSegment:
    """The last function of the chain, which also gives logits."""
    return HeadSegment(config.norm, config.norm_eps, config.vocab_size, config.logits_chunk)


@functools.cache
def segments(config: DecoderConfig) -> tuple[Segment, ...]:
    """The chain; equal layers share one function object."""
    blocks = {window: BlockSegment(config.activation, config.norm, config.norm_eps, window) for window in config.windows}
    return (
        Segment("embed", EmbedSegment(), ("embed",), RESIDUAL),
        *(Segment(f"layers.{i}", blocks[w], (f"layers.{i}",), RESIDUAL) for i, w in enumerate(config.windows)),
        Segment("head", head_segment(config), ("head", "embed") if config.tied else ("head",)),
    )


def meta_params(config: DecoderConfig, dtype: torch.dtype) -> DecoderParams:
    """The parameter tree with tensors that have no data."""
    return map_leaves(lambda shape: torch.empty(shape, dtype=dtype, device="meta"), shapes(config), is_leaf=is_sizes)


def is_sizes(x: Any) -> bool:
    """Whether `x` is a leaf of the tree that `shapes` gives."""
    return isinstance(x, tuple) and all(isinstance(size, int) for size in x)
