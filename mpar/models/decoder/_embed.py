"""The first segment: from tokens, and learned positions if there are any, to the residual stream."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mpar import ops
from mpar.models.decoder._params import Embed
from mpar.models.decoder._places import RESIDUAL
from mpar.models.layers import drop

__all__ = ["EmbedSegment", "rounded"]


@dataclass(frozen=True)
class EmbedSegment:
    """From tokens to the residual stream; embeddings are multiplied by `scale`, and dropped in training."""

    scale: float | None = None
    dropout: float = 0.0

    def __call__(
        self, params: tuple[Embed[Tensor]], x: None, context: Mapping[str, Tensor], *, training: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`x` is None; gives (B, S, D)."""
        (embed,) = params
        y_BSD = ops.constrain(ops.embedding(context["tokens"], embed.table_VD), RESIDUAL)
        if self.scale is not None:
            y_BSD = y_BSD * rounded(self.scale, y_BSD.dtype)
        if embed.positions_SD is not None:
            positions = context["positions"]
            batch = None if positions.shape[0] == 1 else RESIDUAL[0]
            y_BSD = y_BSD + ops.constrain(ops.embedding(positions, embed.positions_SD), (batch, *RESIDUAL[1:]))
        return drop(y_BSD, self.dropout if training else 0.0, context, "embed"), {}


def rounded(value: float, dtype: torch.dtype) -> float:
    """`value` rounded to the nearest number of `dtype`."""
    fraction, exponent = math.frexp(value)
    bits = 1 - round(math.log2(torch.finfo(dtype).eps))
    return math.ldexp(round(math.ldexp(fraction, bits)), exponent - bits)
