"""Qwen2 and Qwen2.5 (arXiv:2407.10671): biases on queries, keys and values; optional sliding windows in the upper layers."""

from collections.abc import Mapping
from typing import Any

from mpar.models.architectures._architecture import Architecture, Plain, windowed
from mpar.models.architectures._llama import LLAMA_NAMES
from mpar.models.architectures.keys._keys import COMMON_KEYS, WINDOW_KEYS, Key, read_windows

__all__ = ["QWEN2"]


def _settings(title: str, values: Mapping[str, Any], plain: Plain) -> dict[str, Any]:
    plain = plain.change(attention={"qkv_bias": True})
    return plain.stack(windowed(plain.attention, read_windows(title, values)))


QWEN2 = Architecture(
    name="qwen2",
    hf_class="Qwen2ForCausalLM",
    keys={**COMMON_KEYS, **WINDOW_KEYS, "num_key_value_heads": Key((int,), nullable=True, positive=True)},
    settings=_settings,
    names=LLAMA_NAMES,
)
