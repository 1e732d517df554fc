"""Parts: what layers are made of. The type of its config says which part is meant; PARTS maps this type to the part's functions.

To add a part, write a module with
- its config, a frozen dataclass (equal configs are one function to the compiler);
- a struct of its parameters that is generic in its leaf;
- `*_shapes(config, hidden_size)`, which gives this struct with the sizes of each leaf (None if the config has no such leaf);
- `*_AXES`, this struct with the logical axes of every leaf;
- `fn(params, config, x_BSD, context)`, which gives what is added to the residual stream, or a tuple of that, losses and metrics;
and enter it in PARTS. The name of a leaf decides how it starts: one with "bias" at zero, one with "norm" at a gain of one, all
others normal. A part that needs something else has `Part.init`.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpar import ops
from mpar.models.layers._attend_pages import ATTENTION_PAGES_AXES, AttentionPages, attend_pages, attention_pages_shapes
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
from mpar.models.layers._cache import CacheSizes
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
from mpar.models.layers._latent_pages import LATENT_PAGES_AXES, LatentPages, latent_attend_pages, latent_pages_shapes
from mpar.models.layers.mamba import (
    MAMBA_AXES,
    MAMBA_CARRIED_AXES,
    MAMBA_ROWS_AXES,
    Mamba,
    MambaConfig,
    MambaState,
    decode_mamba,
    init_mamba_leaf,
    mamba,
    mamba_by_rows,
    mamba_rows_shapes,
    mamba_shapes,
    mamba_slice,
)
from mpar.models.layers.moe import MOE_AXES, Moe, MoeConfig, moe, moe_shapes, updated_choice_bias
from mpar.tree import Leaf

__all__ = [
    "PARTS",
    "Applied",
    "Cache",
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
"""The state of a mixer after the tokens decoded so far."""
Carried = AttentionCarried[Tensor] | LatentCarried[Tensor] | MambaState[Tensor]
"""What a mixer carries from a slice of rows to later slices."""
Cache = AttentionPages[Leaf] | LatentPages[Leaf] | MambaState[Leaf]
"""What a mixer keeps of all rows from step to step."""
Update = tuple[str, Callable[[Tensor, Tensor], Tensor]]
"""The name of a metric, and `fn(parameter, total of the metric)`, which gives the parameter after a step."""
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
    return {"choice_bias_E": ("expert_counts", _choice_bias_rule(config.bias_rate))}


@functools.cache
def _choice_bias_rule(rate: float) -> Callable[[Tensor, Tensor], Tensor]:
    """The same function for all layers of a rate, so that equal updates are compiled once."""
    return functools.partial(updated_choice_bias, rate=rate)


def _decode_mamba(
    params: Mamba[Tensor], config: MambaConfig, x_BSD: Tensor, context: Mapping[str, Tensor], state: MambaState[Tensor] | None
) -> tuple[Tensor, MambaState[Tensor]]:
    return decode_mamba(params, config, x_BSD, state)  # it reads no context: a scan has no positions


@dataclass(frozen=True)
class Part:
    """What a decoder needs to know of one part. Each function takes the configs and parameters of its own part only. The types of
    a table of all parts cannot express this, so they are Any here; `part_of` and `apply_part` are typed.

    shapes, axes, apply: see the docstring of the module.
    train:    takes the place of apply in training; None: apply is used there too.
    field:    the field of a layer's parameters that holds those of the part.
    pairs:    `fn(config)`: multiplications per pair of tokens: of query with key, and of attention weight with value.
    updates:  `fn(config)`: how each leaf without gradient is updated, by the name of the leaf.
    of_all_tokens: `fn(config)`: the options, as `name=value`, because of which the part looks at all tokens of a microbatch or
              has a loss over them. If there are any, the context of a batch with labels has as "weight" the total token weight of
              the batch.
    forbids_microbatches: `fn(config)`: why the batch of a step cannot be cut into microbatches, and what to do instead; None if
              it can.
    decode:   `fn(params, config, x_BSD, context, state)` -> `(y_BSD, state)` for tokens that follow those of `state` (None: they
              are the first). The context has order (S,), the positions of the tokens, and RoPE tables at these positions. None
              for mixers that need the whole row, and for parts in which positions do not see each other.
    slice:    `fn(params, config, x_BSD, context, past)` -> `(y_BSD, carried)`: apply for a slice of rows, see
              `mpar.chain.Carry`. None for mixers that need the whole row, and for parts in which positions do not see each other.
    carried_axes: the logical axes of what slice carries.
    reach:    `fn(config)`: how many positions back a position reads what was carried, counting itself; None for all.
    cached:   `fn(params, config, x_BTD, context, cache, sizes)` -> `(y_BTD, cache)`: apply for tokens of several rows, each after
              those that the cache holds; sizes: a `CacheSizes`. None for mixers that have no such cache, and for parts in which
              positions do not see each other.
    cache_shapes: `fn(config, sizes)`: the sizes of each leaf of this cache; cache_axes: their logical axes.
    init:     `fn(config, leaf, key, bounds, dtype)`: the elements of a fresh leaf within `bounds` (a range for each dim), or None
              if the leaf starts as its name says. Every element depends only on `key` and its global index.
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
    cached: Callable[[Any, Any, Tensor, Mapping[str, Tensor], Any, CacheSizes], tuple[Tensor, Any]] | None = None
    cache_shapes: Callable[[Any, CacheSizes], Any] | None = None
    cache_axes: Any = None
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
        cached=attend_pages,
        cache_shapes=attention_pages_shapes,
        cache_axes=ATTENTION_PAGES_AXES,
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
        cached=latent_attend_pages,
        cache_shapes=latent_pages_shapes,
        cache_axes=LATENT_PAGES_AXES,
    ),
    MambaConfig: Part(
        mamba_shapes,
        MAMBA_AXES,
        mamba,
        "mamba",
        decode=_decode_mamba,
        slice=mamba_slice,
        carried_axes=MAMBA_CARRIED_AXES,
        reach=lambda config: 2,  # a position itself, and the one before it, whose slice carried the state
        init=init_mamba_leaf,
        cached=mamba_by_rows,
        cache_shapes=mamba_rows_shapes,
        cache_axes=MAMBA_ROWS_AXES,
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
    """`(y_BSD, losses, metrics)`, the last two empty if the part has none. training: whether this is for training."""
    part = part_of(config)
    fn = part.train if training and part.train is not None else part.apply
    result = fn(params, config, x_BSD, context)
    return result if isinstance(result, tuple) else (result, {}, {})
