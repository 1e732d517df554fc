"""Multi-head latent attention: keys and values come from one small latent per token (DeepSeek-V2, arXiv:2405.04434, sec. 2.1).

The features of each query and key are in two parts: the first has no RoPE; the second has RoPE, and all heads share its key
("decoupled RoPE", sec. 2.1.3).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from mpar import ops
from mpar.chain import Axes
from mpar.errors import ConfigError
from mpar.models.layers._attend_past import attend_past
from mpar.models.layers._rope import MAIN, table_keys
from mpar.models.layers._sizes import Sizes
from mpar.tree import Leaf, struct

__all__ = [
    "LATENT_ATTENTION_AXES",
    "LATENT_CARRIED_AXES",
    "LatentAttention",
    "LatentAttentionConfig",
    "LatentCarried",
    "LatentState",
    "decode_latent_attention",
    "latent_attend",
    "latent_attention_shapes",
    "latent_merged",
    "latent_queries",
    "latent_scale",
    "latent_slice",
    "latents",
]


@dataclass(frozen=True)
class LatentAttentionConfig:
    """Sizes of one layer's attention.

    q_rank:  size of the latent that queries are made from; None if they are made from x.
    kv_rank: size of the latent that keys and values are made from.
    nope_size, rope_size: features of a query or key without RoPE, and with it. v_size: features of a value.
    scale:   what q @ k is multiplied by, None for 1 / sqrt(nope_size + rope_size).
    interleaved: RoPE turns neighbours (0, 1), (2, 3), ... together; otherwise element i and element i + rope_size / 2.
    bias:    the projections to latents and the output projection have biases.
    norm_eps: eps of the norms of latents.
    rope:    name of the rotation, one of the model's.
    Raises ConfigError with all sizes that are impossible.
    """

    num_heads: int
    kv_rank: int
    nope_size: int
    rope_size: int
    v_size: int
    q_rank: int | None = None
    scale: float | None = None
    interleaved: bool = True
    bias: bool = False
    norm_eps: float = 1e-6
    rope: str = MAIN

    def __post_init__(self) -> None:
        names = ("num_heads", "kv_rank", "nope_size", "rope_size", "v_size", "q_rank")
        sizes = {name: getattr(self, name) for name in names}
        problems = [f"{name}={size}: must be a positive int" for name, size in sizes.items() if size is not None and size < 1]
        if self.rope_size % 2:
            problems.append(f"rope_size={self.rope_size} is odd; RoPE turns pairs")
        if problems:
            raise ConfigError("cannot make latent attention:\n" + "\n".join(f"  {problem}" for problem in problems))

    @property
    def qk_size(self) -> int:
        """The size of a query or key head."""
        return self.nope_size + self.rope_size


@struct
class LatentAttention(Generic[Leaf]):
    """Projections. C: features of the latent of keys and values. L: features of the latent of queries.

    `kv_a_DC` gives the latent, followed by the part of the key with RoPE. `kv_b_CNH` gives, for each head, the part of the key
    without RoPE, followed by the value. If queries have no latent, `q_DNH` gives them directly, and the leaves with L are None.
    """

    kv_a_DC: Leaf
    kv_a_norm_C: Leaf
    kv_b_CNH: Leaf
    o_NHD: Leaf
    q_DNH: Leaf | None = None
    q_a_DL: Leaf | None = None
    q_a_norm_L: Leaf | None = None
    q_b_LNH: Leaf | None = None
    q_a_bias_L: Leaf | None = None
    kv_a_bias_C: Leaf | None = None
    o_bias_D: Leaf | None = None


LATENT_ATTENTION_AXES: LatentAttention[Axes] = LatentAttention(
    kv_a_DC=("embed", None),
    kv_a_norm_C=(None,),
    kv_b_CNH=(None, "heads", "head"),
    o_NHD=("heads", "head", "embed"),
    q_DNH=("embed", "heads", "head"),
    q_a_DL=("embed", None),
    q_a_norm_L=(None,),
    q_b_LNH=(None, "heads", "head"),
    q_a_bias_L=(None,),
    kv_a_bias_C=(None,),
    o_bias_D=("embed",),
)


def latent_attention_shapes(config: LatentAttentionConfig, hidden_size: int) -> LatentAttention[Sizes]:
    """The parameters with a tuple of sizes for each leaf."""
    D, N, L, C = hidden_size, config.num_heads, config.q_rank, config.kv_rank
    return LatentAttention(
        kv_a_DC=(D, C + config.rope_size),
        kv_a_norm_C=(C,),
        kv_b_CNH=(C, N, config.nope_size + config.v_size),
        o_NHD=(N, config.v_size, D),
        q_DNH=(D, N, config.qk_size) if L is None else None,
        q_a_DL=None if L is None else (D, L),
        q_a_norm_L=None if L is None else (L,),
        q_b_LNH=None if L is None else (L, N, config.qk_size),
        q_a_bias_L=(L,) if config.bias and L is not None else None,
        kv_a_bias_C=(C + config.rope_size,) if config.bias else None,
        o_bias_D=(D,) if config.bias else None,
    )


@struct
class LatentState:
    """For each token so far: the latent and the key's part after RoPE. Keys and values are made from these alone."""

    latent_BMC: Tensor
    k_rope_BMH: Tensor
    order_M: Tensor


@struct
class LatentCarried(Generic[Leaf]):
    """The latents of a slice of rows, and the parts of its keys with RoPE; later slices make keys and values from them."""

    latent_BMC: Leaf
    k_rope_BMH: Leaf


LATENT_CARRIED_AXES: LatentCarried[Axes] = LatentCarried(("batch", "seq", None), ("batch", "seq", None))


def latent_attend(
    params: LatentAttention[Tensor], config: LatentAttentionConfig, x_BSD: Tensor, context: Mapping[str, Tensor]
) -> Tensor:
    """Causal attention of `x_BSD` to itself, within a document.

    `context` has the RoPE tables, documents (B, S) if rows are packed, and order (S,) if rows are permuted.
    """
    return latent_slice(params, config, x_BSD, context, ())[0]


def latent_slice(
    params: LatentAttention[Tensor],
    config: LatentAttentionConfig,
    x_BSD: Tensor,
    context: Mapping[str, Tensor],
    past: Sequence[LatentCarried[Tensor]],
) -> tuple[Tensor, LatentCarried[Tensor]]:
    """`latent_attend` for a slice of rows, `x_BSD`: the result, and the latents that are carried to later slices.

    `past` has the latents that were carried from earlier slices. Latents are carried because they are smaller than keys and
    values, which each later slice makes from them again.
    """
    q_nope_BSNH, q_rope_BSNH = latent_queries(params, config, x_BSD, context)
    new = LatentCarried(*latents(params, config, x_BSD, context))
    q_BSNH = ops.name(torch.cat([q_nope_BSNH, q_rope_BSNH], -1), "q_rope")
    q_BSNH = ops.constrain(q_BSNH, ("batch", "attend_seq", "attend_heads", "head"))
    (k_BSNH, v_BSNH), *past_keys = (_keys(params, config, carried) for carried in (new, *past))
    out_BSNH = attend_past(q_BSNH, k_BSNH, v_BSNH, past_keys, context, scale=latent_scale(config))
    return latent_merged(params, ops.constrain(out_BSNH, ("batch", "seq", "heads", "head"))), new


def _keys(
    params: LatentAttention[Tensor], config: LatentAttentionConfig, carried: LatentCarried[Tensor]
) -> tuple[Tensor, Tensor]:
    """Keys and values of the tokens whose latents are `carried`."""
    up_BMNH = ops.einsum("bsc,cnh->bsnh", carried.latent_BMC, params.kv_b_CNH)
    k_nope_BMNH, v_BMNH = up_BMNH.split([config.nope_size, config.v_size], -1)
    k_BMNH = torch.cat([k_nope_BMNH, carried.k_rope_BMH[:, :, None].expand(-1, -1, config.num_heads, -1)], -1)
    place = ("batch", "attend_kv_seq", "attend_kv_heads", "head")
    return ops.constrain(ops.name(k_BMNH, "k_rope"), place), ops.constrain(ops.name(v_BMNH, "v"), place)


def decode_latent_attention(
    params: LatentAttention[Tensor],
    config: LatentAttentionConfig,
    x_BSD: Tensor,
    context: Mapping[str, Tensor],
    state: LatentState | None,
) -> tuple[Tensor, LatentState]:
    """`latent_attend` for tokens that follow those of `state` (None: they are the first), and the state after them.

    Keys and values are never made (sec. 2.1.2): queries are projected to the size of the latent, and heads attend to latents.
    `context` has order (S,), the positions of the tokens, and the RoPE tables at these positions.
    """
    q_nope_BSNH, q_rope_BSNH = latent_queries(params, config, x_BSD, context)
    latent_BMC, k_rope_BMH = latents(params, config, x_BSD, context)
    order_M = context["order"]
    if state is not None:
        latent_BMC = torch.cat([state.latent_BMC, latent_BMC], 1)
        k_rope_BMH = torch.cat([state.k_rope_BMH, k_rope_BMH], 1)
        order_M = torch.cat([state.order_M, order_M])
    up_CNH, out_CNH = params.kv_b_CNH.split([config.nope_size, config.v_size], -1)
    q_BSNC = torch.cat([ops.einsum("bsnh,cnh->bsnc", q_nope_BSNH, up_CNH), q_rope_BSNH], -1)
    k_BM1C = torch.cat([latent_BMC, k_rope_BMH], -1)[:, :, None]
    mixed_BSNC, _ = ops.attention(
        q_BSNC, k_BM1C, latent_BMC[:, :, None], q_order=context["order"], k_order=order_M, causal=True, scale=latent_scale(config)
    )
    out_BSNH = ops.einsum("bsnc,cnh->bsnh", mixed_BSNC, out_CNH)
    return latent_merged(params, out_BSNH), LatentState(latent_BMC, k_rope_BMH, order_M)


def latent_queries(
    params: LatentAttention[Tensor], config: LatentAttentionConfig, x_BSD: Tensor, context: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """The parts of queries without RoPE, and the parts with RoPE, which are already turned."""
    if params.q_DNH is not None:
        q_BSNH = ops.einsum("bsd,dnh->bsnh", x_BSD, params.q_DNH)
    else:
        assert params.q_a_DL is not None and params.q_b_LNH is not None
        latent_BSL = ops.name(_plus(ops.einsum("bsd,dl->bsl", x_BSD, params.q_a_DL), params.q_a_bias_L), "q_latent")
        latent_BSL = ops.name(ops.rms_norm(latent_BSL, params.q_a_norm_L, eps=config.norm_eps), "q_norm")
        q_BSNH = ops.einsum("bsl,lnh->bsnh", latent_BSL, params.q_b_LNH)
    nope_BSNH, rope_BSNH = ops.name(q_BSNH, "q").split([config.nope_size, config.rope_size], -1)
    return nope_BSNH, _turned(config, rope_BSNH, context)


def latents(
    params: LatentAttention[Tensor], config: LatentAttentionConfig, x_BSD: Tensor, context: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """The normed latent of keys and values, and the part of the key with RoPE, already turned, which all heads share."""
    latent_and_key_BSC = ops.name(_plus(ops.einsum("bsd,dc->bsc", x_BSD, params.kv_a_DC), params.kv_a_bias_C), "kv_latent")
    latent_BSC, rope_BSH = latent_and_key_BSC.split([config.kv_rank, config.rope_size], -1)
    latent_BSC = ops.name(ops.rms_norm(latent_BSC, params.kv_a_norm_C, eps=config.norm_eps), "kv_norm")
    return latent_BSC, _turned(config, rope_BSH[:, :, None], context)[:, :, 0]


def _turned(config: LatentAttentionConfig, x_BSNH: Tensor, context: Mapping[str, Tensor]) -> Tensor:
    cos, sin = (context[key] for key in table_keys(config.rope))
    return ops.rope(x_BSNH, cos, sin, interleaved=config.interleaved)


def latent_scale(config: LatentAttentionConfig) -> float:
    return config.qk_size**-0.5 if config.scale is None else config.scale


def latent_merged(params: LatentAttention[Tensor], out_BSNH: Tensor) -> Tensor:
    """The output projection of all heads."""
    out_BSNH = ops.name(out_BSNH, "attn")
    out_BSD = ops.constrain(ops.einsum("bsnh,nhd->bsd", out_BSNH, params.o_NHD), ("batch", "residual_seq", "embed"))
    return ops.name(_plus(out_BSD, params.o_bias_D), "attn_out")


def _plus(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias
