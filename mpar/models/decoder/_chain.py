"""The chain of a decoder: embedding, a segment for each layer, the layer for further tokens, head.

Every model of `mpar.models` is this chain with its own config; Touvron et al. 2023, arXiv:2302.13971, section 2.2, describe the
plain case. `layers/_parts.py` says what layers are made of.
"""

import functools
from collections.abc import Callable

from mpar.chain import Carry, Segment
from mpar.models.decoder._block import BlockSegment
from mpar.models.decoder._config import DecoderConfig, LayerConfig
from mpar.models.decoder._embed import EmbedSegment
from mpar.models.decoder._head import head_segment
from mpar.models.decoder._multi_token import MultiTokenSegment
from mpar.models.decoder._places import RESIDUAL
from mpar.models.layers import part_of

__all__ = ["segments"]


@functools.cache
def segments(config: DecoderConfig) -> tuple[Segment, ...]:
    """The chain; equal layers share one function object."""
    blocks = {layer: BlockSegment(layer) for layer in config.layers}
    mtp: tuple[Segment, ...] = ()
    if config.multi_token is not None:
        fn = MultiTokenSegment(BlockSegment(config.multi_token.layer), head_segment(config), config.multi_token.loss_weight)
        mtp = (Segment("mtp", fn, ("mtp", "embed", "head"), RESIDUAL, _carry(config.multi_token.layer, fn.slice)),)
    return (
        Segment("embed", EmbedSegment(config.embed_scale, config.dropout), ("embed",), RESIDUAL),
        *(
            Segment(f"layers.{i}", blocks[layer], (f"layers.{i}",), RESIDUAL, _carry(layer, blocks[layer].slice))
            for i, layer in enumerate(config.layers)
        ),
        *mtp,
        Segment("head", head_segment(config), ("head", "embed") if config.tied else ("head",)),
    )


def _carry(layer: LayerConfig, fn: Callable) -> Carry | None:
    """The `Carry` of a segment with this layer, whose function for slices is `fn`; None if rows of the layer cannot be cut."""
    part = part_of(layer.mixer)
    return None if part.slice is None else Carry(fn, part.carried_axes, part.reach(layer.mixer))
