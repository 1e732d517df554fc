"""Architectures: how Hugging Face model types differ. Each is declared in a module of its own; ARCHITECTURES has them all.

To use an architecture of your own, make it from what is exported here and pass it to `models.from_config` in a table:

    OURS = dataclasses.replace(LLAMA, name="ours", hf_class="OursForCausalLM", settings=our_settings)
    model = models.from_config(config, architectures={"ours": OURS})
"""

from mpar.models.architectures._architecture import Architecture, Plain, Ropes, no_rope, one_rope, windowed
from mpar.models.architectures._deepseek_v2 import DEEPSEEK_V2
from mpar.models.architectures._deepseek_v3 import DEEPSEEK_V3
from mpar.models.architectures._gemma2 import GEMMA2
from mpar.models.architectures._gemma3 import GEMMA3
from mpar.models.architectures._gpt2 import GPT2
from mpar.models.architectures._gpt_oss import GPT_OSS
from mpar.models.architectures._llama import LLAMA, LLAMA_NAMES
from mpar.models.architectures._mamba2 import MAMBA2
from mpar.models.architectures._mistral import MISTRAL
from mpar.models.architectures._mixtral import MIXTRAL
from mpar.models.architectures._olmo2 import OLMO2
from mpar.models.architectures._phi3 import PHI3
from mpar.models.architectures._qwen2 import QWEN2
from mpar.models.architectures._qwen2_moe import QWEN2_MOE
from mpar.models.architectures._qwen3 import QWEN3
from mpar.models.architectures._qwen3_moe import QWEN3_MOE
from mpar.models.architectures._read import find_architecture, read_decoder
from mpar.models.architectures._starcoder2 import STARCODER2
from mpar.models.architectures._table import ARCHITECTURES, architecture_table
from mpar.models.architectures.keys import COMMON_KEYS, Key, Values

__all__ = [
    "ARCHITECTURES",
    "COMMON_KEYS",
    "DEEPSEEK_V2",
    "DEEPSEEK_V3",
    "GEMMA2",
    "GEMMA3",
    "GPT2",
    "GPT_OSS",
    "LLAMA",
    "LLAMA_NAMES",
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
    "Architecture",
    "Key",
    "Plain",
    "Ropes",
    "Values",
    "architecture_table",
    "find_architecture",
    "no_rope",
    "one_rope",
    "read_decoder",
    "windowed",
]
