"""Starcoder2 (arXiv:2402.19173): layer norms with biases, a feed-forward layer without gate, biases on all projections."""

from dataclasses import replace

from mpar.models.architectures._architecture import Architecture, Plain
from mpar.models.architectures._llama import LLAMA_NAMES
from mpar.models.architectures.keys import COMMON_KEYS, Key, Values
from mpar.models.decoder import DecoderConfig

__all__ = ["STARCODER2"]

_BLOCK = "model.layers.{i}"
STARCODER2_NAMES = {
    **{path: name for path, name in LLAMA_NAMES.items() if ".mlp." not in path},
    "layers.{i}.attn_norm_bias_D": (f"{_BLOCK}.input_layernorm.bias", "d -> d"),
    "layers.{i}.mlp_norm_bias_D": (f"{_BLOCK}.post_attention_layernorm.bias", "d -> d"),
    "layers.{i}.mlp.up_DF": (f"{_BLOCK}.mlp.c_fc.weight", "f d -> d f"),
    "layers.{i}.mlp.down_FD": (f"{_BLOCK}.mlp.c_proj.weight", "d f -> f d"),
    "layers.{i}.mlp.up_bias_F": (f"{_BLOCK}.mlp.c_fc.bias", "f -> f"),
    "layers.{i}.mlp.down_bias_D": (f"{_BLOCK}.mlp.c_proj.bias", "d -> d"),
    "head.norm_bias_D": ("model.norm.bias", "d -> d"),
}
NO_DROPOUT = Key((int, float), 0.0, accepted=(0,))


def _settings(title: str, values: Values, plain: Plain) -> DecoderConfig:
    bias = values["use_bias"]
    attention = replace(plain.attention, qkv_bias=bias, o_bias=bias, window=values["sliding_window"])
    norm = replace(plain.norm, kind="layer_norm", bias=True)  # norms have biases even if use_bias is false
    return replace(plain, norm=norm).stack(attention, replace(plain.mlp, gated=False, bias=bias))


STARCODER2 = Architecture(
    name="starcoder2",
    hf_class="Starcoder2ForCausalLM",
    keys={
        **{name: key for name, key in COMMON_KEYS.items() if name != "rms_norm_eps"},
        "num_key_value_heads": Key((int,), 2, positive=True),
        "hidden_act": Key((str,), "gelu_pytorch_tanh", accepted=COMMON_KEYS["hidden_act"].accepted),
        "norm_epsilon": Key((int, float), 1e-5, positive=True),
        "initializer_range": Key((int, float), 0.018042),
        "tie_word_embeddings": Key((bool,), True),
        "use_bias": Key((bool,), True),
        "sliding_window": Key((int,), None, nullable=True, positive=True),
        "attention_dropout": NO_DROPOUT,
        "residual_dropout": NO_DROPOUT,
        "embedding_dropout": NO_DROPOUT,
        "norm_type": Key((str,), "layer_norm", accepted=("layer_norm",)),
        "mlp_type": Key((str,), "default", accepted=("default",)),
    },
    settings=_settings,
    names=STARCODER2_NAMES,
    norm_eps="norm_epsilon",
)
