"""The decoder: its config, its parameters and their initial values, and the segments of its chain."""

from mpar.models.decoder._block import BlockSegment
from mpar.models.decoder._chain import segments
from mpar.models.decoder._config import DecoderConfig, LayerConfig, MultiTokenConfig, with_dropout, with_mlp_chunk
from mpar.models.decoder._head import HeadSegment, ScreenedHeadSegment, all_have_logits, head_segment
from mpar.models.decoder._init import init_leaf
from mpar.models.decoder._next_tokens import NEXT_KEYS, NEXT_WEIGHTS, with_next_tokens
from mpar.models.decoder._params import Block, DecoderParams, Embed, Head, MultiToken, axes, meta_params, shapes

__all__ = [
    "NEXT_KEYS",
    "NEXT_WEIGHTS",
    "Block",
    "BlockSegment",
    "DecoderConfig",
    "DecoderParams",
    "Embed",
    "Head",
    "HeadSegment",
    "LayerConfig",
    "MultiToken",
    "MultiTokenConfig",
    "ScreenedHeadSegment",
    "all_have_logits",
    "axes",
    "head_segment",
    "init_leaf",
    "meta_params",
    "segments",
    "shapes",
    "with_dropout",
    "with_mlp_chunk",
    "with_next_tokens",
]
