"""Gated feed-forward layers: SwiGLU and GEGLU (Shazeer 2020, arXiv:2002.05202, eq. 6)."""

from typing import Any, cast

from torch import Tensor

from mpar import ops
from mpar.tree import struct

__all__ = ["ACTIVATIONS", "GATED_MLP_AXES", "GatedMLP", "feed_forward"]


@struct
class GatedMLP:
    """`down(activation(gate(x)) * up(x))`, with optional biases."""

    gate_DF: Tensor
    up_DF: Tensor
    down_FD: Tensor
    gate_bias_F: Tensor | None = None
    up_bias_F: Tensor | None = None
    down_bias_D: Tensor | None = None


GATED_MLP_AXES = cast(Any, GatedMLP)(
    gate_DF=("embed", "mlp"),
    up_DF=("embed", "mlp"),
    down_FD=("mlp", "embed"),
    gate_bias_F=("mlp",),
    up_bias_F=("mlp",),
    down_bias_D=("embed",),
)

ACTIVATIONS = {
    "silu": ops.swiglu,
    "gelu": lambda gate, up: ops.geglu(gate, up, approximate="none"),
    "gelu_pytorch_tanh": lambda gate, up: ops.geglu(gate, up, approximate="tanh"),
}
"""Name of the activation, as Hugging Face writes it, to `fn(gate, up)`."""


def feed_forward(params: GatedMLP, x_BSD: Tensor, *, activation: str) -> Tensor:
    """The layer applied to `x_BSD`; `activation` is a key of ACTIVATIONS."""
    gate_BSF = ops.name(_linear(x_BSD, params.gate_DF, params.gate_bias_F), "gate")
    up_BSF = ops.name(_linear(x_BSD, params.up_DF, params.up_bias_F), "up")
    hidden_BSF = ops.name(ACTIVATIONS[activation](gate_BSF, up_BSF), "mlp_act")
    out_BSD = ops.constrain(ops.einsum("bsf,fd->bsd", hidden_BSF, params.down_FD), ("batch", "residual_seq", "embed"))
    return ops.name(out_BSD if params.down_bias_D is None else out_BSD + params.down_bias_D, "mlp_out")


def _linear(x_BSD: Tensor, weight_DF: Tensor, bias_F: Tensor | None) -> Tensor:
    y_BSF = ops.einsum("bsd,df->bsf", x_BSD, weight_DF)
    return y_BSF if bias_F is None else y_BSF + bias_F
