"""Qwen2-MoE and Qwen1.5-MoE (arXiv:2407.10671, section 2.2.2): experts, and a shared expert with a gate for every token."""

from dataclasses import replace

from mpar.models.architectures._architecture import Architecture, Plain, windowed
from mpar.models.architectures._llama import LLAMA_NAMES
from mpar.models.architectures.keys import (
    COMMON_KEYS,
    EXPERT_KEYS,
    WINDOW_KEYS,
    Key,
    Values,
    aux_loss,
    expert_names,
    num_experts,
    read_windows,
    sparse_layers,
)
from mpar.models.decoder import DecoderConfig
from mpar.models.layers import MlpConfig, MoeConfig

__all__ = ["QWEN2_MOE", "SPARSE_KEYS"]

_MLP = "model.layers.{i}.mlp"
QWEN2_MOE_NAMES = {
    **LLAMA_NAMES,
    **expert_names(_MLP),
    "layers.{i}.mlp.router_DE": (f"{_MLP}.gate.weight", "e d -> d e"),
    "layers.{i}.mlp.shared.gate_DF": (f"{_MLP}.shared_expert.gate_proj.weight", "f d -> d f"),
    "layers.{i}.mlp.shared.up_DF": (f"{_MLP}.shared_expert.up_proj.weight", "f d -> d f"),
    "layers.{i}.mlp.shared.down_FD": (f"{_MLP}.shared_expert.down_proj.weight", "d f -> f d"),
    "layers.{i}.mlp.shared_gate_D1": (f"{_MLP}.shared_expert_gate.weight", "one d -> d one"),
}
SPARSE_KEYS = {
    **EXPERT_KEYS,
    "norm_topk_prob": Key((bool,), False),
    "decoder_sparse_step": Key((int,), 1, positive=True),
    "mlp_only_layers": Key((list,), None, nullable=True),
}


def _settings(title: str, values: Values, plain: Plain) -> DecoderConfig:
    attention = replace(plain.attention, qkv_bias=values["qkv_bias"])
    experts = MoeConfig(
        num_experts=num_experts(title, values, default=60),
        top_k=values["num_experts_per_tok"],
        mlp_size=values["moe_intermediate_size"],
        activation=values["hidden_act"],
        normalise=values["norm_topk_prob"],
        shared=MlpConfig(values["shared_expert_intermediate_size"], values["hidden_act"]),
        shared_gate=True,
        aux_loss=aux_loss(values),
    )
    mlps = [experts if sparse else plain.mlp for sparse in sparse_layers(title, values)]
    return plain.stack(windowed(attention, _windows(title, values)), mlps)


def _windows(title: str, values: Values) -> tuple[int | None, ...]:
    """The windows of all layers. Without layer_types, layers 0, 2, 4, ... below max_window_layers have one."""
    if values["layer_types"] is None:
        slides = [i % 2 == 0 and i < values["max_window_layers"] for i in range(values["num_hidden_layers"])]
        kinds = ["sliding_attention" if slide and values["use_sliding_window"] else "full_attention" for slide in slides]
        values = {**values, "layer_types": kinds}
    return read_windows(title, {**values, "sliding_window": values["sliding_window"] or None})


QWEN2_MOE = Architecture(
    name="qwen2_moe",
    hf_class="Qwen2MoeForCausalLM",
    keys={
        **COMMON_KEYS,
        **WINDOW_KEYS,
        **SPARSE_KEYS,
        "num_key_value_heads": Key((int,), 16, nullable=True, positive=True),
        "num_experts_per_tok": Key((int,), 4, positive=True),
        "moe_intermediate_size": Key((int,), 1408, positive=True),
        "shared_expert_intermediate_size": Key((int,), 5632, positive=True),
        "qkv_bias": Key((bool,), True),
        "sliding_window": Key((int,), 4096, nullable=True),  # transformers writes 0 if no layer has a window
    },
    settings=_settings,
    names=QWEN2_MOE_NAMES,
)
