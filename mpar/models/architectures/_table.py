"""The table of known architectures."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from mpar.models.architectures._architecture import Architecture
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

__all__ = ["ARCHITECTURES", "architecture_table"]


def architecture_table(declarations: Iterable[Architecture]) -> Mapping[str, Architecture]:
    """A table of architectures by name, as model_type of a config gives it. The table cannot be changed."""
    return MappingProxyType({architecture.name: architecture for architecture in declarations})


ARCHITECTURES = architecture_table(
    (
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
    )
)
"""The architectures that functions know if their caller passes no other table."""
