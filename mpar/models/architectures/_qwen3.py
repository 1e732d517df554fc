"""Qwen3, dense (arXiv:2505.09388): RMS norms of each query and key head before RoPE; the config sets the head size."""

from dataclasses import replace

from mpar.models.architectures._architecture import Architecture, Plain, windowed
from mpar.models.architectures._llama import LLAMA_NAMES
from mpar.models.architectures.keys import COMMON_KEYS, WINDOW_KEYS, Key, Values, read_windows
from mpar.models.decoder import DecoderConfig

__all__ = ["QWEN3"]

QWEN3_NAMES = {
    **LLAMA_NAMES,
    "layers.{i}.attention.q_norm_H": ("model.layers.{i}.self_attn.q_norm.weight", "h -> h"),
    "layers.{i}.attention.k_norm_H": ("model.layers.{i}.self_attn.k_norm.weight", "h -> h"),
}


def _settings(title: str, values: Values, plain: Plain) -> DecoderConfig:
    bias = values["attention_bias"]
    attention = replace(plain.attention, qkv_bias=bias, o_bias=bias, qk_norm="head")
    return plain.stack(windowed(attention, read_windows(title, values)))


QWEN3 = Architecture(
    name="qwen3",
    hf_class="Qwen3ForCausalLM",
    keys={
        **COMMON_KEYS,
        **WINDOW_KEYS,
        "num_key_value_heads": Key((int,), nullable=True, positive=True),
        "head_dim": Key((int,), 128, nullable=True, positive=True),
        "attention_bias": Key((bool,), False),
    },
    settings=_settings,
    names=QWEN3_NAMES,
)
