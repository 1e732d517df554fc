"""Parts: what layers are made of. A part is known by the type of its config; PARTS says what to do with it.

To add one, write a module with
- its config, a frozen dataclass (equal configs are one function to the compiler);
- a struct of its parameters that is generic in its leaf, `*_shapes(config, hidden_size)` that gives it with the sizes of each
  leaf (None where the config asks for no such leaf), and `*_AXES`, the struct with the logical axes of every leaf;
- `fn(params, config, x_BSD, context)`, which gives what is added to the residual stream, or `(that, losses, metrics)`;
and enter it below. The name of a leaf decides how it starts: "bias" zero, "norm" one, all others normal, unless `init` says more.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpar import ops
from mpar.models.layers._attention import (
    ATTENTION_AXES,
    ATTENTION_CARRIED_AXES,
    Attention,
    AttentionCarried,
    AttentionConfig,
    AttentionState,
    attend,
    attend_slice,
    attention_shapes,
    decode_attention,
)
from mpar.models.layers._feed_forward import FEED_FORWARD_AXES, FeedForward, MlpConfig, mlp, mlp_shapes
from mpar.models.layers._latent_attention import (
    LATENT_ATTENTION_AXES,
    LATENT_CARRIED_AXES,
    LatentAttention,
    LatentAttentionConfig,
    LatentCarried,
    LatentState,
    decode_latent_attention,
    latent_attend,
    latent_attention_shapes,
    latent_slice,
)
from mpar.models.layers.mamba import (
    MAMBA_AXES,
    MAMBA_CARRIED_AXES,
    Mamba,
    MambaConfig,
    MambaState,
    decode_mamba,
    init_mamba_leaf,
    mamba,
    mamba_shapes,
    mamba_slice,
)
from mpar.models.layers.moe import MOE_AXES, Moe, MoeConfig, moe, moe_shapes, updated_choice_bias
from mpar.tree import Leaf

__all__ = [
    "PARTS",
    "Applied",
    "Carried",
    "Mixer",
    "Mlp",
    "Part",
    "PartConfig",
    "PartParams",
    "State",
    "Update",
    "apply_part",
    "part_of",
]

Mixer = AttentionConfig | LatentAttentionConfig | MambaConfig
"""Configs of parts that mix tokens."""
Mlp = MlpConfig | MoeConfig
"""Configs of parts that take each token by itself."""
PartConfig = Mixer | Mlp
PartParams = Attention[Leaf] | LatentAttention[Leaf] | Mamba[Leaf] | FeedForward[Leaf] | Moe[Leaf]
State = AttentionState | LatentState | MambaState[Tensor]
"""What a mixer keeps of the tokens so far."""
Carried = AttentionCarried[Tensor] | LatentCarried[Tensor] | MambaState[Tensor]
"""What a mixer leaves of a slice of rows to later slices."""
Update = tuple[str, Callable[[Tensor, Tensor], Tensor]]
"""A metric, and `fn(parameter, total of the metric)`, which gives the parameter after a step."""
Applied = tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]
"""What is added to the residual stream, losses, metrics."""


def _no_pairs(config: PartConfig) -> int:
    return 0


def _reaches_all(config: PartConfig) -> None:
    return None


def _no_updates(config: PartConfig) -> dict[str, Update]:
    return {}


def _no_options(config: PartConfig) -> tuple[str, ...]:
    return ()


def _no_reason(config: PartConfig) -> str | None:
    return None


def _moe_updates(config: MoeConfig) -> dict[str, Update]:
    if not config.choice_bias:
        return {}
    return {"choice_bias_E": ("expert_counts", functools.partial(updated_choice_bias, rate=config.bias_rate))}


def _decode_mamba(
    params: Mamba[Tensor], config: MambaConfig, x_BSD: Tensor, context: Mapping[str, Tensor], state: MambaState[Tensor] | None
) -> tuple[Tensor, MambaState[Tensor]]:
    return decode_mamba(params, config, x_BSD, state)  # no positions


@dataclass(frozen=True)
class Part:
    """What a decoder needs to know of one kind of part. Its functions take configs and parameters of this kind alone, which the
    types of a table of all kinds cannot say: they are Any here, and `part_of` and `apply_part` have the types.

    shapes, axes, apply: see the module.
    train:    apply where the pass trains, if that is not the same.
    field:    where its parameters are in those of a layer.
    pairs:    `fn(config)`: multiplications of a query with a key and of a weight with a value, per pair of tokens.
    updates:  `fn(config)`: the leaves without gradient, and how each is updated.
    of_all_tokens: `fn(config)`: the options, `name=value`, with which it looks at all tokens of a microbatch, or has a loss of
              them. Where there are any, the context of a batch with labels has its total token weight under "weight".
    forbids_microbatches: `fn(config)`: why a step must be one microbatch, and what else to do; None if it may be cut.
    decode:   `fn(params, config, x_BSD, context, state)` -> `(y_BSD, state)` goes on where the tokens of `state` ended (None: at
              the first of all); context has order (S,), the positions of the tokens, and RoPE tables at these. None for mixers
              that need the whole row.
    slice:    `fn(params, config, x_BSD, context, past)` -> `(y_BSD, carried)`: the same as apply where `x_BSD` are slices of
              rows, see `mpar.chain.Carry`. None for mixers that need the whole row, and for parts in which positions see nothing
              of each other. carried_axes: logical axes of carried.
    reach:    `fn(config)`: how many positions back a position reads what was carried over, counting itself; None for all.
    init:     `fn(config, leaf, key, bounds, dtype)`: the part within `bounds` (a range for each dim) of a fresh leaf, or None
              where it starts as its name says. Every element depends on `key` and its global index alone.
    """

    shapes: Callable[[Any, int], Any]
    axes: Any
    apply: Callable[[Any, Any, Tensor, Mapping[str, Tensor]], Any]
    field: str
    train: Callable[[Any, Any, Tensor, Mapping[str, Tensor]], Any] | None = None
    pairs: Callable[[Any], int] = _no_pairs
    updates: Callable[[Any], dict[str, Update]] = _no_updates
    of_all_tokens: Callable[[Any], tuple[str, ...]] = _no_options
    forbids_microbatches: Callable[[Any], str | None] = _no_reason
    decode: Callable[[Any, Any, Tensor, Mapping[str, Tensor], Any], tuple[Tensor, Any]] | None = None
    slice: Callable[[Any, Any, Tensor, Mapping[str, Tensor], Any], tuple[Tensor, Any]] | None = None
    carried_axes: Any = None
    reach: Callable[[Any], int | None] = _reaches_all
    init: Callable[[Any, str, ops.Key, list[range], torch.dtype], Tensor | None] | None = None


PARTS: dict[type[PartConfig], Part] = {
    AttentionConfig: Part(
        attention_shapes,
        ATTENTION_AXES,
        attend,
        "attention",
        pairs=lambda config: 2 * config.num_heads * config.head_size,
        decode=decode_attention,
        slice=attend_slice,
        carried_axes=ATTENTION_CARRIED_AXES,
        reach=lambda config: config.window,
    ),
    LatentAttentionConfig: Part(
        latent_attention_shapes,
        LATENT_ATTENTION_AXES,
        latent_attend,
        "attention",
        pairs=lambda config: config.num_heads * (config.qk_size + config.v_size),
        decode=decode_latent_attention,
        slice=latent_slice,
        carried_axes=LATENT_CARRIED_AXES,
    ),
    MambaConfig: Part(
        mamba_shapes,
        MAMBA_AXES,
        mamba,
        "mamba",
        decode=_decode_mamba,
        slice=mamba_slice,
        carried_axes=MAMBA_CARRIED_AXES,
        reach=lambda config: 2,  # itself and the state before it
        init=init_mamba_leaf,
    ),
    MoeConfig: Part(
        moe_shapes,
        MOE_AXES,
        functools.partial(moe, training=False),
        "mlp",
        train=functools.partial(moe, training=True),
        updates=_moe_updates,
        of_all_tokens=lambda config: config.of_all_tokens,
        forbids_microbatches=lambda config: config.forbids_microbatches,
    ),
    MlpConfig: Part(mlp_shapes, FEED_FORWARD_AXES, mlp, "mlp"),
}


def part_of(config: PartConfig) -> Part:
    """The part that a config belongs to."""
    return PARTS[type(config)]


def apply_part(
    params: PartParams[Tensor], config: PartConfig, x_BSD: Tensor, context: Mapping[str, Tensor], *, training: bool
) -> Applied:
    """`(y_BSD, losses, metrics)`, the last two empty where the part has none. training: the pass trains, it does not evaluate."""
    part = part_of(config)
    fn = part.train if training and part.train is not None else part.apply
    result = fn(params, config, x_BSD, context)
    return result if isinstance(result, tuple) else (result, {}, {})
