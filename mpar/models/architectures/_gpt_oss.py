"""gpt-oss (arXiv:2508.10925): sinks of attention, windows in every other layer, YaRN, experts with biases and a clamped gate."""

from collections.abc import Sequence
from dataclasses import replace

from mpar.models.architectures._architecture import Architecture, Plain, Ropes, one_rope, windowed
from mpar.models.architectures._llama import LLAMA_NAMES
from mpar.models.architectures.keys import COMMON_KEYS, EXPERT_KEYS, Key, Values, aux_loss, num_experts, read_windows
from mpar.models.decoder import DecoderConfig
from mpar.models.layers import MoeConfig

__all__ = ["GPT_OSS"]

_MLP = "model.layers.{i}.mlp"
GPT_OSS_NAMES = {
    **{path: name for path, name in LLAMA_NAMES.items() if ".mlp." not in path},
    "layers.{i}.attention.sinks_N": ("model.layers.{i}.self_attn.sinks", "n -> n"),
    "layers.{i}.mlp.router_DE": (f"{_MLP}.router.weight", "e d -> d e"),
    "layers.{i}.mlp.router_bias_E": (f"{_MLP}.router.bias", "e -> e"),
    "layers.{i}.mlp.gate_EDF": (f"{_MLP}.experts.gate_up_proj", "e d (f +) -> e d f"),
    "layers.{i}.mlp.up_EDF": (f"{_MLP}.experts.gate_up_proj", "e d (f +) -> e d f"),
    "layers.{i}.mlp.down_EFD": (f"{_MLP}.experts.down_proj", "e f d -> e f d"),
    "layers.{i}.mlp.gate_bias_EF": (f"{_MLP}.experts.gate_up_proj_bias", "e (f +) -> e f"),
    "layers.{i}.mlp.up_bias_EF": (f"{_MLP}.experts.gate_up_proj_bias", "e (f +) -> e f"),
    "layers.{i}.mlp.down_bias_ED": (f"{_MLP}.experts.down_proj_bias", "e d -> e d"),
}
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The rotation of configs that do not give one."""


def _ropes(title: str, values: Values, head_size: int, ignore: Sequence[str]) -> Ropes:
    if not values["rope_scaling"] and not values["rope_parameters"]:
        values = {**values, "rope_parameters": YARN}
    return one_rope(title, values, head_size, ignore, theta=150_000.0)


def _settings(title: str, values: Values, plain: Plain) -> DecoderConfig:
    bias = values["attention_bias"]
    attention = replace(plain.attention, qkv_bias=bias, o_bias=bias, sinks=True)
    experts = MoeConfig(
        num_experts=num_experts(title, values, default=128),
        top_k=values["num_experts_per_tok"],
        mlp_size=values["intermediate_size"],
        mlp_bias=True,
        clamp=float(values["swiglu_limit"]),
        clamp_alpha=float(values["swiglu_alpha"]),
        order="post",
        normalise=False,
        router_bias=True,
        aux_loss=aux_loss(values),
    )
    kinds = values["layer_types"]
    if kinds is None:
        kinds = [("sliding_attention", "full_attention")[i % 2] for i in range(plain.num_layers)]
    windows = read_windows(title, {**values, "layer_types": kinds, "use_sliding_window": values["sliding_window"] is not None})
    return plain.stack(windowed(attention, windows), experts)


GPT_OSS = Architecture(
    name="gpt_oss",
    hf_class="GptOssForCausalLM",
    keys={
        **COMMON_KEYS,
        **EXPERT_KEYS,
        "num_key_value_heads": Key((int,), 8, nullable=True, positive=True),
        "head_dim": Key((int,), 64, nullable=True, positive=True),
        "hidden_act": Key((str,), "silu", accepted=("silu",)),
        "rms_norm_eps": Key((int, float), 1e-5, positive=True),
        "max_position_embeddings": Key((int,), 131_072, positive=True),
        "attention_bias": Key((bool,), True),
        "sliding_window": Key((int,), 128, nullable=True, positive=True),
        "layer_types": Key((list,), None, nullable=True),
        "num_experts_per_tok": Key((int,), 4, positive=True),
        "swiglu_alpha": Key((int, float), 1.702, positive=True),
        "swiglu_limit": Key((int, float), 7.0, positive=True),
    },
    settings=_settings,
    names=GPT_OSS_NAMES,
    ignored={
        "experts_per_token": "an older name, which transformers does not read; configs also have num_experts_per_tok",
        "initial_context_length": "the same number as original_max_position_embeddings of the rotation",
    },
    ropes=_ropes,
)
