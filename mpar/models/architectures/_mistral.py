"""Mistral (arXiv:2310.06825): the plain decoder with a sliding window in every layer, or, from version 0.2 on, in none."""

from collections.abc import Mapping
from typing import Any

from mpar.models.architectures._architecture import Architecture, Plain
from mpar.models.architectures._llama import LLAMA_NAMES
from mpar.models.architectures.keys._keys import COMMON_KEYS, Key

__all__ = ["MISTRAL"]


def _settings(title: str, values: Mapping[str, Any], plain: Plain) -> dict[str, Any]:
    return plain.change(attention={"window": values["sliding_window"]}).stack()


MISTRAL = Architecture(
    name="mistral",
    hf_class="MistralForCausalLM",
    keys={
        **COMMON_KEYS,
        "num_key_value_heads": Key((int,), 8, nullable=True, positive=True),
        "sliding_window": Key((int,), 4096, nullable=True, positive=True),
    },
    settings=_settings,
    names=LLAMA_NAMES,
)
