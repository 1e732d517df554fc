"""Models: decoders as chains of segments, and their Hugging Face weights in both directions."""

from mpar.models._build import build, from_config, from_hf, storage_specs
from mpar.models._flops import flops_per_token
from mpar.models._model import Model
from mpar.models.architectures._architecture import ARCHITECTURES
from mpar.models.architectures._deepseek_v2 import DEEPSEEK_V2
from mpar.models.architectures._deepseek_v3 import DEEPSEEK_V3
from mpar.models.architectures._gemma2 import GEMMA2
from mpar.models.architectures._gemma3 import GEMMA3
from mpar.models.architectures._gpt2 import GPT2
from mpar.models.architectures._gpt_oss import GPT_OSS
from mpar.models.architectures._llama import LLAMA
from mpar.models.architectures._mamba2 import MAMBA2
from mpar.models.architectures._mistral import MISTRAL
from mpar.models.architectures._mixtral import MIXTRAL
from mpar.models.architectures._olmo2 import OLMO2
from mpar.models.architectures._phi3 import PHI3
from mpar.models.architectures._qwen2 import QWEN2
from mpar.models.architectures._qwen2_moe import QWEN2_MOE
from mpar.models.architectures._qwen3 import QWEN3
from mpar.models.architectures._qwen3_moe import QWEN3_MOE
from mpar.models.architectures._starcoder2 import STARCODER2
from mpar.models.decoder._decoder import DecoderConfig, DecoderParams
from mpar.models.decoder._multi_token import with_next_tokens
from mpar.models.hf._weights import HfReader, hf_tensors, load_params, shard_slices, to_hf
from mpar.models.layers.moe._config import MoeConfig

__all__ = [
    "ARCHITECTURES",
    "DEEPSEEK_V2",
    "DEEPSEEK_V3",
    "GEMMA2",
    "GEMMA3",
    "GPT2",
    "GPT_OSS",
    "LLAMA",
    "MAMBA2",
    "MISTRAL",
    "MIXTRAL",
    "OLMO2",
    "PHI3",
    "QWEN2",
    "QWEN2_MOE",
    "QWEN3",
    "QWEN3_MOE",
    "STARCODER2",
    "DecoderConfig",
    "DecoderParams",
    "HfReader",
    "Model",
    "MoeConfig",
    "build",
    "flops_per_token",
    "from_config",
    "from_hf",
    "hf_tensors",
    "load_params",
    "shard_slices",
    "storage_specs",
    "to_hf",
    "with_next_tokens",
]
