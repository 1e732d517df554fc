"""Mixtral (arXiv:2401.04088): every feed-forward layer is a mixture of experts, two of eight for each token."""

from collections.abc import Sequence
from dataclasses import replace

from mpar.models.architectures._architecture import Architecture, Plain, Ropes, one_rope
from mpar.models.architectures._llama import LLAMA_NAMES
from mpar.models.architectures.keys import COMMON_KEYS, EXPERT_KEYS, Key, Values, aux_loss, expert_names, num_experts
from mpar.models.decoder import DecoderConfig
from mpar.models.layers import MoeConfig

__all__ = ["MIXTRAL"]

_MOE = "model.layers.{i}.block_sparse_moe"
MIXTRAL_NAMES = {
    **{path: name for path, name in LLAMA_NAMES.items() if ".mlp." not in path},
    **expert_names(_MOE, gate="w1", up="w3", down="w2"),
    "layers.{i}.mlp.router_DE": (f"{_MOE}.gate.weight", "e d -> d e"),
}


def _ropes(title: str, values: Values, head_size: int, ignore: Sequence[str]) -> Ropes:
    return one_rope(title, values, head_size, ignore, theta=1e6)


def _settings(title: str, values: Values, plain: Plain) -> DecoderConfig:
    experts = MoeConfig(
        num_experts=num_experts(title, values, default=8),
        top_k=values["num_experts_per_tok"],
        mlp_size=values["intermediate_size"],
        activation=values["hidden_act"],
        aux_loss=aux_loss(values),
    )
    return plain.stack(replace(plain.attention, window=values["sliding_window"]), experts)


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
    ropes=_ropes,
)
