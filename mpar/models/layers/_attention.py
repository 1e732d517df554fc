"""Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245): its config, parameters, logical axes, function."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal

import torch
from torch import Tensor

from mpar import ops
from mpar.chain import Axes
from mpar.errors import ConfigError
from mpar.models.layers._attend_past import attend_past
from mpar.models.layers._norm import NormConfig, normalise
from mpar.models.layers._rope import MAIN, table_keys
from mpar.models.layers._sizes import Sizes
from mpar.tree import Leaf, struct

__all__ = [
    "ATTENTION_AXES",
    "ATTENTION_CARRIED_AXES",
    "Attention",
    "AttentionCarried",
    "AttentionConfig",
    "AttentionState",
    "attend",
    "attend_slice",
    "attention_shapes",
    "decode_attention",
    "merged",
    "projected",
]


@dataclass(frozen=True)
class AttentionConfig:
    """Sizes and kinds of one layer's attention.

    window:   how many positions a token sees, counting its own; None for all.
    qk_norm:  RMS norms of queries and keys before RoPE, of each head ("head") or over all heads ("width"); `norm` has their eps.
    soft_cap: bound of the scores (Gemma 2, arXiv:2408.00118, section 2).
    sinks:    each head has one more score, a parameter, which takes part in the softmax but has no value.
    scale:    what q @ k is multiplied by, None for 1 / sqrt(head_size).
    rope:     name of the rotation of queries and keys, one of the model's; None for no rotation.

    Raises ConfigError for another qk_norm, or for heads that do not share keys evenly.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: Literal["head", "width"] | None = None
    norm: NormConfig = NormConfig()  # noqa: RUF009 (it is frozen)
    soft_cap: float | None = None
    sinks: bool = False
    scale: float | None = None
    rope: str | None = MAIN

    def __post_init__(self) -> None:
        problems = []
        if self.qk_norm not in ("head", "width", None):
            problems.append(f"qk_norm={self.qk_norm!r}: must be 'head', 'width' or None")
        if min(self.num_heads, self.num_kv_heads, self.head_size) < 1 or self.num_heads % self.num_kv_heads:
            sizes = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_size={self.head_size}"
            problems.append(f"{sizes}: must be positive, and num_kv_heads must divide num_heads")
        if problems:
            raise ConfigError("cannot make an AttentionConfig:\n  " + "\n  ".join(problems))


@struct
class Attention(Generic[Leaf]):
    """Projections; biases, norms and sinks if the config asks for them. C: the features of all heads, N * H or K * H."""

    q_DNH: Leaf
    k_DKH: Leaf
    v_DKH: Leaf
    o_NHD: Leaf
    q_bias_NH: Leaf | None = None
    k_bias_KH: Leaf | None = None
    v_bias_KH: Leaf | None = None
    o_bias_D: Leaf | None = None
    q_norm_H: Leaf | None = None
    k_norm_H: Leaf | None = None
    q_norm_C: Leaf | None = None
    k_norm_C: Leaf | None = None
    sinks_N: Leaf | None = None


ATTENTION_AXES: Attention[Axes] = Attention(
    q_DNH=("embed", "heads", "head"),
    k_DKH=("embed", "kv_heads", "head"),
    v_DKH=("embed", "kv_heads", "head"),
    o_NHD=("heads", "head", "embed"),
    q_bias_NH=("heads", "head"),
    k_bias_KH=("kv_heads", "head"),
    v_bias_KH=("kv_heads", "head"),
    o_bias_D=("embed",),
    q_norm_H=("head",),
    k_norm_H=("head",),
    q_norm_C=(None,),
    k_norm_C=(None,),
    sinks_N=("heads",),
)


@struct
class AttentionState:
    """The keys (after RoPE) and values of those tokens so far that later tokens can see, and the positions of these tokens."""

    k_BMKH: Tensor
    v_BMKH: Tensor
    order_M: Tensor


@struct
class AttentionCarried(Generic[Leaf]):
    """The keys (after RoPE) and values of a slice of rows, to which later slices attend."""

    k_BMKH: Leaf
    v_BMKH: Leaf


CARRIED: Axes = ("batch", "attend_seq", "attend_kv_heads", "head")  # stays sharded along the row even if KEYS gathers it
KEYS: Axes = ("batch", "attend_kv_seq", "attend_kv_heads", "head")
ATTENTION_CARRIED_AXES: AttentionCarried[Axes] = AttentionCarried(CARRIED, CARRIED)


def attention_shapes(config: AttentionConfig, hidden_size: int) -> Attention[Sizes]:
    """The parameters with a tuple of sizes for each leaf."""
    D, N, K, H = hidden_size, config.num_heads, config.num_kv_heads, config.head_size
    qkv, heads, width = config.qkv_bias, config.qk_norm == "head", config.qk_norm == "width"
    return Attention(
        q_DNH=(D, N, H),
        k_DKH=(D, K, H),
        v_DKH=(D, K, H),
        o_NHD=(N, H, D),
        q_bias_NH=(N, H) if qkv else None,
        k_bias_KH=(K, H) if qkv else None,
        v_bias_KH=(K, H) if qkv else None,
        o_bias_D=(D,) if config.o_bias else None,
        q_norm_H=(H,) if heads else None,
        k_norm_H=(H,) if heads else None,
        q_norm_C=(N * H,) if width else None,
        k_norm_C=(K * H,) if width else None,
        sinks_N=(N,) if config.sinks else None,
    )


def attend(params: Attention[Tensor], config: AttentionConfig, x_BSD: Tensor, context: Mapping[str, Tensor]) -> Tensor:
    """Causal attention of `x_BSD` to itself, within a document and, if the config has one, within a window.

    `context` has the RoPE tables, documents (B, S) if rows are packed, and order (S,) if rows are permuted.
    """
    return attend_slice(params, config, x_BSD, context, ())[0]


def attend_slice(
    params: Attention[Tensor],
    config: AttentionConfig,
    x_BSD: Tensor,
    context: Mapping[str, Tensor],
    past: Sequence[AttentionCarried[Tensor]],
) -> tuple[Tensor, AttentionCarried[Tensor]]:
    """`attend` for a slice of rows, `x_BSD`: the result, and the keys and values that are carried to later slices.

    `past` has the keys and values that were carried from earlier slices.
    """
    q_BSNH, k_BSKH, v_BSKH = projected(params, config, x_BSD, context)
    q_BSNH = ops.constrain(q_BSNH, ("batch", "attend_seq", "attend_heads", "head"))
    new = AttentionCarried(ops.constrain(k_BSKH, CARRIED), ops.constrain(v_BSKH, CARRIED))
    keys, *past_keys = ((ops.constrain(carried.k_BMKH, KEYS), ops.constrain(carried.v_BMKH, KEYS)) for carried in (new, *past))
    out_BSNH = attend_past(
        q_BSNH,
        *keys,
        past_keys,
        context,
        sinks_N=params.sinks_N,
        window=config.window,
        scale=config.scale,
        soft_cap=config.soft_cap,
    )
    return merged(params, ops.constrain(out_BSNH, ("batch", "seq", "heads", "head"))), new


def decode_attention(
    params: Attention[Tensor], config: AttentionConfig, x_BSD: Tensor, context: Mapping[str, Tensor], state: AttentionState | None
) -> tuple[Tensor, AttentionState]:
    """`attend` for tokens that follow those of `state` (None: they are the first), and the state after them.

    `context` has order (S,), the positions of the tokens, and the RoPE tables at these positions. If there is a window, the new
    state keeps only the tokens that the next token sees.
    """
    q_BSNH, k_BMKH, v_BMKH = projected(params, config, x_BSD, context)
    order_M = context["order"]
    if state is not None:
        k_BMKH, v_BMKH = torch.cat([state.k_BMKH, k_BMKH], 1), torch.cat([state.v_BMKH, v_BMKH], 1)
        order_M = torch.cat([state.order_M, order_M])
    out_BSNH, _ = ops.attention(
        q_BSNH,
        k_BMKH,
        v_BMKH,
        q_order=context["order"],
        k_order=order_M,
        sinks=params.sinks_N,
        causal=True,
        window=config.window,
        scale=config.scale,
        soft_cap=config.soft_cap,
    )
    first = 0 if config.window is None else max(0, order_M.shape[0] - config.window + 1)
    return merged(params, out_BSNH), AttentionState(k_BMKH[:, first:], v_BMKH[:, first:], order_M[first:])


def projected(
    params: Attention[Tensor], config: AttentionConfig, x_BSD: Tensor, context: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values; queries and keys after their norms and RoPE."""
    q_BSNH = _heads(x_BSD, params.q_DNH, params.q_bias_NH, "q")
    k_BSKH = _heads(x_BSD, params.k_DKH, params.k_bias_KH, "k")
    v_BSKH = _heads(x_BSD, params.v_DKH, params.v_bias_KH, "v")
    q_BSNH = _normed(q_BSNH, config, params.q_norm_H, params.q_norm_C, "q_norm")
    k_BSKH = _normed(k_BSKH, config, params.k_norm_H, params.k_norm_C, "k_norm")
    if config.rope is not None:
        cos, sin = (context[key] for key in table_keys(config.rope))
        q_BSNH = ops.name(ops.rope(q_BSNH, cos, sin), "q_rope")
        k_BSKH = ops.name(ops.rope(k_BSKH, cos, sin), "k_rope")
    return q_BSNH, k_BSKH, v_BSKH


def merged(params: Attention[Tensor], out_BSNH: Tensor) -> Tensor:
    """The output projection of all heads."""
    out_BSNH = ops.name(out_BSNH, "attn")
    out_BSD = ops.constrain(ops.einsum("bsnh,nhd->bsd", out_BSNH, params.o_NHD), ("batch", "residual_seq", "embed"))
    if params.o_bias_D is not None:
        out_BSD = out_BSD + params.o_bias_D
    return ops.name(out_BSD, "attn_out")


def _heads(x_BSD: Tensor, weight_DNH: Tensor, bias_NH: Tensor | None, label: str) -> Tensor:
    y_BSNH = ops.einsum("bsd,dnh->bsnh", x_BSD, weight_DNH)
    return ops.name(y_BSNH if bias_NH is None else y_BSNH + bias_NH, label)


def _normed(x_BSNH: Tensor, config: AttentionConfig, head_H: Tensor | None, width_C: Tensor | None, label: str) -> Tensor:
    if head_H is not None:
        return normalise(config.norm, x_BSNH, head_H, None, label)
    if width_C is None:
        return x_BSNH
    assert config.norm.kind == "rms_norm" and not config.norm.offset
    wide_BSNH = x_BSNH.to(torch.promote_types(x_BSNH.dtype, torch.float32))
    total_BS = ops.einsum("bsnh,bsnh->bs", wide_BSNH, wide_BSNH)  # an einsum because heads may be on several ranks
    rstd_BS = torch.rsqrt(total_BS / width_C.numel() + config.norm.eps)
    y_BSNH = wide_BSNH * rstd_BS[..., None, None] * width_C.unflatten(0, x_BSNH.shape[2:])
    return ops.name(y_BSNH.to(x_BSNH.dtype), label)
