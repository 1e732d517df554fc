"""Mixtral (arXiv:2401.04088): every feed-forward layer is a mixture of experts, two of eight for each token."""

from collections.abc import Mapping
from typing import Any

from mpar.models.architectures._architecture import Architecture, Plain, windowed
from mpar.models.architectures._llama import LLAMA_NAMES
from mpar.models.architectures.keys._experts import EXPERT_KEYS, aux_loss, expert_names, num_experts, rope_with_theta
from mpar.models.architectures.keys._keys import COMMON_KEYS, Key
from mpar.models.layers.moe._moe import MoeConfig

__all__ = ["MIXTRAL"]

_MOE = "model.layers.{i}.block_sparse_moe"
MIXTRAL_NAMES = {
    **{path: name for path, name in LLAMA_NAMES.items() if ".mlp." not in path},
    **expert_names(_MOE, gate="w1", up="w3", down="w2"),
    "layers.{i}.mlp.router_DE": (f"{_MOE}.gate.weight", "e d -> d e"),
}


def _settings(title: str, values: Mapping[str, Any], plain: Plain) -> dict[str, Any]:
    experts = MoeConfig(
        num_experts=num_experts(title, values, default=8),
        top_k=values["num_experts_per_tok"],
        mlp_size=values["intermediate_size"],
        activation=values["hidden_act"],
        aux_loss=aux_loss(values),
    )
    num_layers = plain.num_layers
    return plain.stack(windowed(plain.attention, (values["sliding_window"],) * num_layers), (experts,) * num_layers)


MIXTRAL = Architecture(
    name="mixtral",
    hf_class="MixtralForCausalLM",
    keys={
        **COMMON_KEYS,
        **EXPERT_KEYS,
        "num_key_value_heads": Key((int,), 8, nullable=True, positive=True),
        "rms_norm_eps": Key((int, float), 1e-5, positive=True),
        "num_experts_per_tok": Key((int,), 2, positive=True),
        "sliding_window": Key((int,), None, nullable=True, positive=True),
        "router_jitter_noise": Key((int, float), 0.0, accepted=(0,)),
    },
    settings=_settings,
    names=MIXTRAL_NAMES,
    ropes=rope_with_theta(1e6),
)
