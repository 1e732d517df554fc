"""Qwen2 and Qwen2.5 (arXiv:2407.10671): biases on queries, keys and values; optional sliding windows in the upper layers."""

from dataclasses import replace

from mpar.models.architectures._architecture import Architecture, Plain, windowed
from mpar.models.architectures._llama import LLAMA_NAMES
from mpar.models.architectures.keys import COMMON_KEYS, WINDOW_KEYS, Key, Values, read_windows
from mpar.models.decoder import DecoderConfig

__all__ = ["QWEN2"]


def _settings(title: str, values: Values, plain: Plain) -> DecoderConfig:
    return plain.stack(windowed(replace(plain.attention, qkv_bias=True), read_windows(title, values)))


QWEN2 = Architecture(
    name="qwen2",
    hf_class="Qwen2ForCausalLM",
    keys={**COMMON_KEYS, **WINDOW_KEYS, "num_key_value_heads": Key((int,), nullable=True, positive=True)},
    settings=_settings,
    names=LLAMA_NAMES,
)
