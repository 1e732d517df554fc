"""OLMo 2 (arXiv:2501.00656): norms after attention and feed-forward layer, none before; RMS norms over all heads of q and k."""

from dataclasses import replace

from mpar.models.architectures._architecture import Architecture, Plain
from mpar.models.architectures._llama import LLAMA_NAMES
from mpar.models.architectures.keys import COMMON_KEYS, Key, Values
from mpar.models.decoder import DecoderConfig

__all__ = ["OLMO2"]

_BLOCK = "model.layers.{i}"
OLMO2_NAMES = {
    **{path: name for path, name in LLAMA_NAMES.items() if "layers.{i}.attn_norm" not in path and ".mlp_norm" not in path},
    "layers.{i}.attention.q_norm_C": (f"{_BLOCK}.self_attn.q_norm.weight", "c -> c"),
    "layers.{i}.attention.k_norm_C": (f"{_BLOCK}.self_attn.k_norm.weight", "c -> c"),
    "layers.{i}.attn_post_norm_D": (f"{_BLOCK}.post_attention_layernorm.weight", "d -> d"),
    "layers.{i}.mlp_post_norm_D": (f"{_BLOCK}.post_feedforward_layernorm.weight", "d -> d"),
}


def _settings(title: str, values: Values, plain: Plain) -> DecoderConfig:
    bias = values["attention_bias"]
    return plain.stack(replace(plain.attention, qkv_bias=bias, o_bias=bias, qk_norm="width"), norms="post")


OLMO2 = Architecture(
    name="olmo2",
    hf_class="Olmo2ForCausalLM",
    keys={
        **COMMON_KEYS,
        "num_key_value_heads": Key((int,), None, nullable=True, positive=True),
        "rms_norm_eps": Key((int, float), 1e-5, positive=True),
        "attention_bias": Key((bool,), False),
    },
    settings=_settings,
    names=OLMO2_NAMES,
)
