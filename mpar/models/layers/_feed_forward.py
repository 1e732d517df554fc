"""Feed-forward layers: gated ones, SwiGLU and GEGLU (Shazeer 2020, arXiv:2002.05202, eq. 6), and plain ones without a gate."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, cast

import torch
from torch import Tensor

from mpar import ops
from mpar.chain import Axes
from mpar.errors import ConfigError
from mpar.models.layers._sizes import Sizes
from mpar.ops import Activation
from mpar.tree import Leaf, struct

__all__ = ["ACTIVATIONS", "FEED_FORWARD_AXES", "FeedForward", "MlpConfig", "feed_forward", "mlp", "mlp_shapes"]


@dataclass(frozen=True)
class MlpConfig:
    """The config of a feed-forward layer.

    size: number of hidden features. activation: a key of ACTIVATIONS. gated: see `FeedForward`.
    bias: whether all its matrices have biases.
    chunk: None computes all tokens at once; a number computes that many tokens at a time and does not keep hidden features.
    Raises ConfigError if chunk is not positive, or if there are both a chunk and biases.
    """

    size: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.chunk is not None and (self.chunk < 1 or self.bias):
            reason = "must be a positive int" if self.chunk < 1 else "this model's feed-forward layers have biases; use null"
            raise ConfigError(f"cannot compute feed-forward layers with mlp_chunk={self.chunk} tokens at a time: {reason}")


@struct
class FeedForward(Generic[Leaf]):
    """`down(activation(gate(x)) * up(x))`, or without a gate `down(activation(up(x)))`; biases are optional."""

    gate_DF: Leaf | None
    up_DF: Leaf
    down_FD: Leaf
    gate_bias_F: Leaf | None = None
    up_bias_F: Leaf | None = None
    down_bias_D: Leaf | None = None


FEED_FORWARD_AXES: FeedForward[Axes] = FeedForward(
    gate_DF=("embed", "mlp"),
    up_DF=("embed", "mlp"),
    down_FD=("mlp", "embed"),
    gate_bias_F=("mlp",),
    up_bias_F=("mlp",),
    down_bias_D=("embed",),
)

Activate = tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], Tensor]]
ACTIVATIONS: dict[str, Activate] = {
    "silu": (ops.swiglu, torch.nn.functional.silu),
    "gelu": (functools.partial(ops.geglu, approximate="none"), functools.partial(torch.nn.functional.gelu, approximate="none")),
    "gelu_pytorch_tanh": (
        functools.partial(ops.geglu, approximate="tanh"),
        functools.partial(torch.nn.functional.gelu, approximate="tanh"),
    ),
}
"""Name of the activation, as Hugging Face writes it, to `(fn(gate, up), fn(up))`."""


def mlp_shapes(config: MlpConfig, hidden_size: int) -> FeedForward[Sizes]:
    """The parameters with a tuple of sizes for each leaf."""
    D, F = hidden_size, config.size
    return FeedForward(
        gate_DF=(D, F) if config.gated else None,
        up_DF=(D, F),
        down_FD=(F, D),
        gate_bias_F=(F,) if config.bias and config.gated else None,
        up_bias_F=(F,) if config.bias else None,
        down_bias_D=(D,) if config.bias else None,
    )


def mlp(params: FeedForward[Tensor], config: MlpConfig, x_BSD: Tensor, context: Mapping[str, Tensor]) -> Tensor:
    """The layer applied to `x_BSD`."""
    if config.chunk is None:
        return feed_forward(params, x_BSD, activation=config.activation)
    matrices = params.gate_DF, params.up_DF, params.down_FD
    out_BSD = ops.mlp_tiled(x_BSD, *matrices, activation=cast(Activation, config.activation), chunk=config.chunk)
    return ops.name(ops.constrain(out_BSD, ("batch", "residual_seq", "embed")), "mlp_out")


def feed_forward(params: FeedForward[Tensor], x_BSD: Tensor, *, activation: str) -> Tensor:
    """The layer applied to `x_BSD`; `activation` is a key of ACTIVATIONS."""
    gated, plain = ACTIVATIONS[activation]
    if params.gate_DF is None:
        hidden_BSF = plain(ops.name(_linear(x_BSD, params.up_DF, params.up_bias_F), "up"))
    else:
        gate_BSF = ops.name(_linear(x_BSD, params.gate_DF, params.gate_bias_F), "gate")
        hidden_BSF = gated(gate_BSF, ops.name(_linear(x_BSD, params.up_DF, params.up_bias_F), "up"))
    hidden_BSF = ops.name(hidden_BSF, "mlp_act")
    out_BSD = ops.constrain(ops.einsum("bsf,fd->bsd", hidden_BSF, params.down_FD), ("batch", "residual_seq", "embed"))
    return ops.name(out_BSD if params.down_bias_D is None else out_BSD + params.down_bias_D, "mlp_out")


def _linear(x_BSD: Tensor, weight_DF: Tensor, bias_F: Tensor | None) -> Tensor:
    y_BSF = ops.einsum("bsd,df->bsf", x_BSD, weight_DF)
    return y_BSF if bias_F is None else y_BSF + bias_F
