"""Mistral (arXiv:2310.06825): the plain decoder with a sliding window in every layer, or, from version 0.2 on, in none."""

from dataclasses import replace

from mpar.models.architectures._architecture import Architecture, Plain
from mpar.models.architectures._llama import LLAMA_NAMES
from mpar.models.architectures.keys import COMMON_KEYS, Key, Values
from mpar.models.decoder import DecoderConfig

__all__ = ["MISTRAL"]


def _settings(title: str, values: Values, plain: Plain) -> DecoderConfig:
    return plain.stack(replace(plain.attention, window=values["sliding_window"]))


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
