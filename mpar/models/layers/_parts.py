"""Parts: what layers are made of. A part is known by the type of its config; PARTS says what to do with it.

To add one, write a module with
- its config, a frozen dataclass (equal configs are one function to the compiler);
- a struct of its parameters, `*_shapes(config, hidden_size)` that gives the struct with a tuple of sizes for each leaf (None
  where the config asks for no such leaf), and `*_AXES`, the struct with the logical axes of every leaf;
- `fn(params, config, x_BSD, context)`, which gives what is added to the residual stream, or `(that, losses, metrics)`;
and enter it below. The name of a leaf decides how it starts: "bias" zero, "norm" one, all others normal, unless `init` says more.
A config whose losses need the batch's total token weight, context["weight"], has an attribute `side_losses` that is true.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpar.models.layers._attention import (
    ATTENTION_AXES,
    ATTENTION_LEFT_AXES,
    AttentionConfig,
    attend,
    attend_slice,
    attend_step,
    attention_shapes,
)
from mpar.models.layers._feed_forward import FEED_FORWARD_AXES, MlpConfig, mlp, mlp_shapes
from mpar.models.layers._latent_attention import (
    LATENT_ATTENTION_AXES,
    LATENT_LEFT_AXES,
    LatentAttentionConfig,
    latent_attend,
    latent_attention_shapes,
    latent_slice,
    latent_step,
)
from mpar.models.layers.mamba._mamba import (
    MAMBA_AXES,
    MAMBA_LEFT_AXES,
    Mamba,
    MambaConfig,
    MambaState,
    init_mamba_leaf,
    mamba,
    mamba_shapes,
    mamba_slice,
    mamba_step,
)
from mpar.models.layers.moe._moe import MOE_AXES, MoeConfig, moe, moe_shapes, updated_choice_bias

__all__ = ["PARTS", "Part", "Update", "apply_part", "part_of"]

Update = tuple[str, Callable[[Tensor, Tensor], Tensor]]
Applied = tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]


def _nothing(config: Any) -> int:
    return 0


def _everything(config: Any) -> None:
    return None


def _no_updates(config: Any) -> dict[str, Update]:
    return {}


def _moe_updates(config: MoeConfig) -> dict[str, Update]:
    if not config.choice_bias:
        return {}
    return {"choice_bias_E": ("expert_counts", functools.partial(updated_choice_bias, rate=config.bias_rate))}


def _mamba_step(
    params: Mamba, config: MambaConfig, x_BSD: Tensor, context: Mapping[str, Tensor], state: MambaState | None
) -> tuple[Tensor, MambaState]:
    return mamba_step(params, config, x_BSD, state)  # no positions


@dataclass(frozen=True)
class Part:
    """What a decoder needs to know of one kind of part.

    shapes, axes, apply: see the module.
    field:    where its parameters are in those of a layer.
    pairs:    `fn(config)`: multiplications of a query with a key and of a weight with a value, per pair of tokens.
    updates:  `fn(config)`: leaf without gradient -> (metric, `fn(leaf, total of the metric)`, which gives it after a step).
    step:     `fn(params, config, x_BSD, context, state)` -> `(y_BSD, state)` goes on where the tokens of `state` ended (None: at
              the first of all); context has order (S,), the positions of the tokens, and RoPE tables at these. None for mixers
              that need the whole row.
    slice:    `fn(params, config, x_BSD, context, past)` -> `(y_BSD, left)`: the same as apply where `x_BSD` are slices of rows,
              see `mpar.chain.Carry`; left_axes: logical axes of left. None for mixers that need the whole row, and for parts in
              which positions see nothing of each other.
    reach:    `fn(config)`: of how many positions a position reads what is left, itself among them; None for all before it.
    init:     `fn(config, leaf, key, bounds, dtype)`: the part within `bounds` (a range for each dim) of a fresh leaf, or None
              where it starts as its name says. Every element depends on `key` and its global index alone.
    """

    shapes: Callable[[Any, int], Any]
    axes: Any
    apply: Callable[[Any, Any, Tensor, Mapping[str, Tensor]], Any]
    field: str
    pairs: Callable[[Any], int] = _nothing
    updates: Callable[[Any], dict[str, Update]] = _no_updates
    step: Callable[[Any, Any, Tensor, Mapping[str, Tensor], Any], tuple[Tensor, Any]] | None = None
    slice: Callable[[Any, Any, Tensor, Mapping[str, Tensor], Any], tuple[Tensor, Any]] | None = None
    left_axes: Any = None
    reach: Callable[[Any], int | None] = _everything
    init: Callable[[Any, str, tuple[int, int], list[range], torch.dtype], Tensor | None] | None = None


PARTS: dict[type, Part] = {
    AttentionConfig: Part(
        attention_shapes,
        ATTENTION_AXES,
        attend,
        "attention",
        pairs=lambda config: 2 * config.num_heads * config.head_size,
        step=attend_step,
        slice=attend_slice,
        left_axes=ATTENTION_LEFT_AXES,
        reach=lambda config: config.window,
    ),
    LatentAttentionConfig: Part(
        latent_attention_shapes,
        LATENT_ATTENTION_AXES,
        latent_attend,
        "attention",
        pairs=lambda config: config.num_heads * (config.qk_size + config.v_size),
        step=latent_step,
        slice=latent_slice,
        left_axes=LATENT_LEFT_AXES,
    ),
    MambaConfig: Part(
        mamba_shapes,
        MAMBA_AXES,
        mamba,
        "mamba",
        step=_mamba_step,
        slice=mamba_slice,
        left_axes=MAMBA_LEFT_AXES,
        reach=lambda config: 2,  # itself and the state before it
        init=init_mamba_leaf,
    ),
    MoeConfig: Part(moe_shapes, MOE_AXES, moe, "mlp", updates=_moe_updates),
    MlpConfig: Part(mlp_shapes, FEED_FORWARD_AXES, mlp, "mlp"),
}


def part_of(config: Any) -> Part:
    """The part that a config belongs to."""
    return PARTS[type(config)]


def apply_part(params: Any, config: Any, x_BSD: Tensor, context: Mapping[str, Tensor]) -> Applied:
    """`(y_BSD, losses, metrics)`, the last two empty where the part has none."""
    result = part_of(config).apply(params, config, x_BSD, context)
    return result if isinstance(result, tuple) else (result, {}, {})
