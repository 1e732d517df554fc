"""Models: decoders as chains of segments, and their Hugging Face weights in both directions.

architectures: declarations of model types.        decoder: config, parameters and segments of all of them.
layers:        what decoders are made of.          hf: folders of weights.
"""

from mpar.models._build import build, from_config, from_hf, from_module
from mpar.models._cached import SCREEN, CachedDecoder, can_screen, with_cache
from mpar.models._declared import DeclaredModel
from mpar.models._flops import flops_per_token
from mpar.models._freeze import FrozenModel, freeze, with_frozen
from mpar.models._language_head import HiddenHead, LanguageHead, LinearHead
from mpar.models._matrix import Matrix, MatrixLeaf
from mpar.models._model import Model, Multiplications, Read, Trainable
from mpar.models._options import ModelOptions
from mpar.models._scored import ScoredDecoder
from mpar.models._stated_positions import stated_positions
from mpar.models._storage import read_params, storage_specs
from mpar.models._validate import folder_problems
from mpar.models._wrapped import WrappedModel
from mpar.models.architectures import (
    ARCHITECTURES,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GEMMA2,
    GEMMA3,
    GPT2,
    GPT_OSS,
    LLAMA,
    MAMBA2,
    MISTRAL,
    MIXTRAL,
    OLMO2,
    PHI3,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    STARCODER2,
    Architecture,
)
from mpar.models.decoder import DecoderConfig, DecoderParams, with_next_tokens
from mpar.models.hf import (
    MAX_FILE_BYTES,
    QUANTISATION,
    HfReader,
    MappedFile,
    StoredLeaf,
    compare_hf,
    hf_tensors,
    load_params,
    locate,
    map_leaves_to_stored,
    open_weights,
    read_json,
    shard_slices,
    stored_leaves,
    to_hf,
    write_hf,
)
from mpar.models.layers import DRAW, DRAW_AXES, CacheSizes, MoeConfig, drop, segment_numbers, with_draws

__all__ = [
    "ARCHITECTURES",
    "DEEPSEEK_V2",
    "DEEPSEEK_V3",
    "DRAW",
    "DRAW_AXES",
    "GEMMA2",
    "GEMMA3",
    "GPT2",
    "GPT_OSS",
    "LLAMA",
    "MAMBA2",
    "MAX_FILE_BYTES",
    "MISTRAL",
    "MIXTRAL",
    "OLMO2",
    "PHI3",
    "QUANTISATION",
    "QWEN2",
    "QWEN2_MOE",
    "QWEN3",
    "QWEN3_MOE",
    "SCREEN",
    "STARCODER2",
    "Architecture",
    "CacheSizes",
    "CachedDecoder",
    "DeclaredModel",
    "DecoderConfig",
    "DecoderParams",
    "FrozenModel",
    "HfReader",
    "HiddenHead",
    "LanguageHead",
    "LinearHead",
    "MappedFile",
    "Matrix",
    "MatrixLeaf",
    "Model",
    "ModelOptions",
    "MoeConfig",
    "Multiplications",
    "Read",
    "ScoredDecoder",
    "StoredLeaf",
    "Trainable",
    "WrappedModel",
    "build",
    "can_screen",
    "compare_hf",
    "drop",
    "flops_per_token",
    "folder_problems",
    "freeze",
    "from_config",
    "from_hf",
    "from_module",
    "hf_tensors",
    "load_params",
    "locate",
    "map_leaves_to_stored",
    "open_weights",
    "read_json",
    "read_params",
    "segment_numbers",
    "shard_slices",
    "stated_positions",
    "storage_specs",
    "stored_leaves",
    "to_hf",
    "with_cache",
    "with_draws",
    "with_frozen",
    "with_next_tokens",
    "write_hf",
]
