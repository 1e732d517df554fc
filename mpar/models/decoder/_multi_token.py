"""Multi-token prediction: one more layer learns the token after the next (DeepSeek-AI 2024, arXiv:2412.19437, section 2.2).

It reads the normed output of the decoder at a position and the embedding of the next token, and shares embedding and head.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from mpar import ops
from mpar.models.decoder._block import BlockSegment
from mpar.models.decoder._head import HeadSegment
from mpar.models.decoder._next_tokens import NEXT_WEIGHTS
from mpar.models.decoder._params import Head
from mpar.models.decoder._places import BLOCK, RESIDUAL
from mpar.models.layers import normalise

__all__ = ["MultiTokenSegment"]


@dataclass(frozen=True)
class MultiTokenSegment:
    """Adds the loss of the token after the next; the residual stream goes through unchanged."""

    block: BlockSegment
    head: HeadSegment
    weight: float

    def __call__(self, params: tuple, x: Tensor, context: Mapping[str, Tensor], *, training: bool) -> tuple:
        """(B, S, D) to `((B, S, D), losses)`, with metrics if the layer has some. Without next_labels it computes nothing.

        The loss is a sum over tokens, later divided by the weight of all labels like the main loss (arXiv:2412.19437, eq. 24).
        Positions without a next token have no loss, but a router of the layer still routes and counts them.
        """
        x, _, *losses_and_metrics = self.slice(params, x, context, (), training=training)
        return x, *losses_and_metrics

    def slice(self, params: tuple, x: Tensor, context: Mapping[str, Tensor], past: tuple, *, training: bool) -> tuple:
        """`__call__` for a slice of rows, see `Carry.fn`; what is carried to later slices is the second result."""
        if "next_labels" not in context:
            return x, None, {}
        y_BSD, embed, shared_head = self.hidden(params, x, context), params[1], params[2]
        y_BSD, carried, losses, *metrics = self.block.slice((params[0].block,), y_BSD, context, past, training=training)
        labels = {"labels": context["next_labels"]}
        if NEXT_WEIGHTS in context:
            labels["token_weights"] = context[NEXT_WEIGHTS]
        head: Head[Tensor] = Head(norm_D=params[0].norm_D, head_DV=shared_head.head_DV)
        losses["mtp_loss"] = self.weight * self.head((head, embed), y_BSD, labels, training=training)[1]["loss"]
        return x, carried, losses, *metrics

    def hidden(self, params: tuple, x: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        """The input of the layer: the normed output of the decoder and the normed embedding of the next token, joined."""
        mtp, embed, head = params
        norm = self.head.norm
        next_BSD = ops.constrain(ops.embedding(context["next_tokens"], embed.table_VD), RESIDUAL)
        x = normalise(norm, x, head.norm_D, head.norm_bias_D, "final_norm")
        next_BSD = ops.constrain(normalise(norm, next_BSD, mtp.embed_norm_D, None, "mtp_norm"), BLOCK)
        x = ops.constrain(normalise(norm, x, mtp.hidden_norm_D, None, "mtp_norm"), BLOCK)
        joined_BSD = ops.einsum("bsd,de->bse", next_BSD, mtp.embed_DD) + ops.einsum("bsd,de->bse", x, mtp.hidden_DD)
        return ops.constrain(joined_BSD, RESIDUAL)
