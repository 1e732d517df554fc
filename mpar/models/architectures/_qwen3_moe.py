"""Qwen3-MoE (arXiv:2505.09388, table 2): Qwen3's attention with experts, none of them shared."""

from dataclasses import replace

from mpar.models.architectures._architecture import Architecture, Plain
from mpar.models.architectures._qwen2_moe import SPARSE_KEYS
from mpar.models.architectures._qwen3 import QWEN3_NAMES
from mpar.models.architectures.keys import COMMON_KEYS, Key, Values, aux_loss, expert_names, num_experts, sparse_layers
from mpar.models.decoder import DecoderConfig
from mpar.models.layers import MoeConfig

__all__ = ["QWEN3_MOE"]

_MLP = "model.layers.{i}.mlp"
QWEN3_MOE_NAMES = {
    **QWEN3_NAMES,
    **expert_names(_MLP),
    "layers.{i}.mlp.router_DE": (f"{_MLP}.gate.weight", "e d -> d e"),
}


def _settings(title: str, values: Values, plain: Plain) -> DecoderConfig:
    bias, window = values["attention_bias"], values["sliding_window"] if values["use_sliding_window"] else None
    attention = replace(plain.attention, qkv_bias=bias, o_bias=bias, qk_norm="head", window=window)
    experts = MoeConfig(
        num_experts=num_experts(title, values, default=128),
        top_k=values["num_experts_per_tok"],
        mlp_size=values["moe_intermediate_size"],
        activation=values["hidden_act"],
        normalise=values["norm_topk_prob"],
        aux_loss=aux_loss(values),
    )
    return plain.stack(attention, [experts if sparse else plain.mlp for sparse in sparse_layers(title, values)])


QWEN3_MOE = Architecture(
    name="qwen3_moe",
    hf_class="Qwen3MoeForCausalLM",
    keys={
        **COMMON_KEYS,
        **SPARSE_KEYS,
        "num_key_value_heads": Key((int,), 4, nullable=True, positive=True),
        "num_experts_per_tok": Key((int,), 8, positive=True),
        "moe_intermediate_size": Key((int,), 768, positive=True),
        "attention_bias": Key((bool,), False),
        "use_sliding_window": Key((bool,), False),
        "sliding_window": Key((int,), 4096, nullable=True, positive=True),
    },
    settings=_settings,
    names=QWEN3_MOE_NAMES,
    ignored={"max_window_layers": "published configs have it; transformers does not read it, all layers slide or none"},
)
