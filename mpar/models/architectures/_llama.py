"""Llama 3, 3.1, 3.2 (arXiv:2407.21783) and its forerunners: the plain decoder, with optional biases."""

from dataclasses import replace

from mpar.models.architectures._architecture import Architecture, Plain
from mpar.models.architectures.keys import COMMON_KEYS, Key, Values
from mpar.models.decoder import DecoderConfig

__all__ = ["LLAMA", "LLAMA_NAMES"]

_BLOCK = "model.layers.{i}"
LLAMA_NAMES = {
    "embed.table_VD": ("model.embed_tokens.weight", "v d -> v d"),
    "layers.{i}.attn_norm_D": (f"{_BLOCK}.input_layernorm.weight", "d -> d"),
    "layers.{i}.attention.q_DNH": (f"{_BLOCK}.self_attn.q_proj.weight", "(n h) d -> d n h"),
    "layers.{i}.attention.k_DKH": (f"{_BLOCK}.self_attn.k_proj.weight", "(k h) d -> d k h"),
    "layers.{i}.attention.v_DKH": (f"{_BLOCK}.self_attn.v_proj.weight", "(k h) d -> d k h"),
    "layers.{i}.attention.o_NHD": (f"{_BLOCK}.self_attn.o_proj.weight", "d (n h) -> n h d"),
    "layers.{i}.attention.q_bias_NH": (f"{_BLOCK}.self_attn.q_proj.bias", "(n h) -> n h"),
    "layers.{i}.attention.k_bias_KH": (f"{_BLOCK}.self_attn.k_proj.bias", "(k h) -> k h"),
    "layers.{i}.attention.v_bias_KH": (f"{_BLOCK}.self_attn.v_proj.bias", "(k h) -> k h"),
    "layers.{i}.attention.o_bias_D": (f"{_BLOCK}.self_attn.o_proj.bias", "d -> d"),
    "layers.{i}.mlp_norm_D": (f"{_BLOCK}.post_attention_layernorm.weight", "d -> d"),
    "layers.{i}.mlp.gate_DF": (f"{_BLOCK}.mlp.gate_proj.weight", "f d -> d f"),
    "layers.{i}.mlp.up_DF": (f"{_BLOCK}.mlp.up_proj.weight", "f d -> d f"),
    "layers.{i}.mlp.down_FD": (f"{_BLOCK}.mlp.down_proj.weight", "d f -> f d"),
    "layers.{i}.mlp.gate_bias_F": (f"{_BLOCK}.mlp.gate_proj.bias", "f -> f"),
    "layers.{i}.mlp.up_bias_F": (f"{_BLOCK}.mlp.up_proj.bias", "f -> f"),
    "layers.{i}.mlp.down_bias_D": (f"{_BLOCK}.mlp.down_proj.bias", "d -> d"),
    "head.norm_D": ("model.norm.weight", "d -> d"),
    "head.head_DV": ("lm_head.weight", "v d -> d v"),
}


def _settings(title: str, values: Values, plain: Plain) -> DecoderConfig:
    bias = values["attention_bias"]
    return plain.stack(replace(plain.attention, qkv_bias=bias, o_bias=bias), replace(plain.mlp, bias=values["mlp_bias"]))


LLAMA = Architecture(
    name="llama",
    hf_class="LlamaForCausalLM",
    keys={
        **COMMON_KEYS,
        "num_key_value_heads": Key((int,), None, nullable=True, positive=True),
        "attention_bias": Key((bool,), False),
        "mlp_bias": Key((bool,), False),
        "pretraining_tp": Key((int,), 1, nullable=True, accepted=(1, None)),
    },
    settings=_settings,
    names=LLAMA_NAMES,
)
