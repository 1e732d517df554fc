"""Layers: what a decoder is made of. Attention, feed-forward layers, experts, scans, norms, rotations; each with its config."""

from mpar.models.layers._attention import Attention, AttentionConfig
from mpar.models.layers._cache import CacheSizes
from mpar.models.layers._drop import DRAW, DRAW_AXES, check_rate, drop, segment_numbers, with_draws
from mpar.models.layers._feed_forward import ACTIVATIONS, FeedForward, MlpConfig
from mpar.models.layers._latent_attention import (
    LatentAttention,
    LatentAttentionConfig,
    decode_latent_attention,
    latent_attend,
    latent_attention_shapes,
)
from mpar.models.layers._norm import NormConfig, normalise
from mpar.models.layers._parts import (
    PARTS,
    Applied,
    Cache,
    Carried,
    Mixer,
    Mlp,
    Part,
    PartConfig,
    PartParams,
    State,
    Update,
    apply_part,
    part_of,
)
from mpar.models.layers._rope import (
    MAIN,
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    Rope,
    YarnRope,
    depends_on_length,
    rope_tables,
    table_keys,
)
from mpar.models.layers._sizes import Sizes, is_sizes
from mpar.models.layers.mamba import MambaConfig
from mpar.models.layers.moe import ROUTER_OPTIONS, Moe, MoeConfig, moe, with_router_options

__all__ = [
    "ACTIVATIONS",
    "DRAW",
    "DRAW_AXES",
    "MAIN",
    "PARTS",
    "ROUTER_OPTIONS",
    "Applied",
    "Attention",
    "AttentionConfig",
    "Cache",
    "CacheSizes",
    "Carried",
    "DynamicRope",
    "FeedForward",
    "LatentAttention",
    "LatentAttentionConfig",
    "LinearRope",
    "Llama3Rope",
    "LongRope",
    "MambaConfig",
    "Mixer",
    "Mlp",
    "MlpConfig",
    "Moe",
    "MoeConfig",
    "NormConfig",
    "Part",
    "PartConfig",
    "PartParams",
    "Rope",
    "Sizes",
    "State",
    "Update",
    "YarnRope",
    "apply_part",
    "check_rate",
    "decode_latent_attention",
    "depends_on_length",
    "drop",
    "is_sizes",
    "latent_attend",
    "latent_attention_shapes",
    "moe",
    "normalise",
    "part_of",
    "rope_tables",
    "segment_numbers",
    "table_keys",
    "with_draws",
    "with_router_options",
]
