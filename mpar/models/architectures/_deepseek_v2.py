"""DeepSeek-V2 (arXiv:2405.04434): latent attention, dense layers first, then shared and routed experts in groups."""

import math
from collections.abc import Sequence
from dataclasses import replace

from mpar.errors import ConfigError
from mpar.models.architectures._architecture import Architecture, Plain, Ropes
from mpar.models.architectures._llama import LLAMA_NAMES
from mpar.models.architectures.keys import COMMON_KEYS, Key, Values, expert_names, read_rope
from mpar.models.decoder import DecoderConfig
from mpar.models.layers import MAIN, LatentAttentionConfig, MlpConfig, MoeConfig

__all__ = [
    "DEEPSEEK_IGNORED",
    "DEEPSEEK_KEYS",
    "DEEPSEEK_NAMES",
    "DEEPSEEK_V2",
    "check_deepseek",
    "latent_attention",
    "latent_rope",
]

_ATTENTION, _MLP = "model.layers.{i}.self_attn", "model.layers.{i}.mlp"
DEEPSEEK_NAMES = {
    **{path: name for path, name in LLAMA_NAMES.items() if ".attention." not in path},
    "layers.{i}.attention.kv_a_DC": (f"{_ATTENTION}.kv_a_proj_with_mqa.weight", "c d -> d c"),
    "layers.{i}.attention.kv_a_bias_C": (f"{_ATTENTION}.kv_a_proj_with_mqa.bias", "c -> c"),
    "layers.{i}.attention.kv_a_norm_C": (f"{_ATTENTION}.kv_a_layernorm.weight", "c -> c"),
    "layers.{i}.attention.kv_b_CNH": (f"{_ATTENTION}.kv_b_proj.weight", "(n h) c -> c n h"),
    "layers.{i}.attention.o_NHD": (f"{_ATTENTION}.o_proj.weight", "d (n h) -> n h d"),
    "layers.{i}.attention.o_bias_D": (f"{_ATTENTION}.o_proj.bias", "d -> d"),
    "layers.{i}.attention.q_DNH": (f"{_ATTENTION}.q_proj.weight", "(n h) d -> d n h"),
    "layers.{i}.attention.q_a_DL": (f"{_ATTENTION}.q_a_proj.weight", "l d -> d l"),
    "layers.{i}.attention.q_a_bias_L": (f"{_ATTENTION}.q_a_proj.bias", "l -> l"),
    "layers.{i}.attention.q_a_norm_L": (f"{_ATTENTION}.q_a_layernorm.weight", "l -> l"),
    "layers.{i}.attention.q_b_LNH": (f"{_ATTENTION}.q_b_proj.weight", "(n h) l -> l n h"),
    **expert_names(_MLP),
    "layers.{i}.mlp.router_DE": (f"{_MLP}.gate.weight", "e d -> d e"),
    "layers.{i}.mlp.shared.gate_DF": (f"{_MLP}.shared_experts.gate_proj.weight", "f d -> d f"),
    "layers.{i}.mlp.shared.up_DF": (f"{_MLP}.shared_experts.up_proj.weight", "f d -> d f"),
    "layers.{i}.mlp.shared.down_FD": (f"{_MLP}.shared_experts.down_proj.weight", "d f -> f d"),
    "layers.{i}.mlp.shared.gate_bias_F": (f"{_MLP}.shared_experts.gate_proj.bias", "f -> f"),
    "layers.{i}.mlp.shared.up_bias_F": (f"{_MLP}.shared_experts.up_proj.bias", "f -> f"),
    "layers.{i}.mlp.shared.down_bias_D": (f"{_MLP}.shared_experts.down_proj.bias", "d -> d"),
}

DEEPSEEK_KEYS = {
    **COMMON_KEYS,
    "num_key_value_heads": Key((int,), None, nullable=True, positive=True),
    "kv_lora_rank": Key((int,), 512, positive=True),
    "q_lora_rank": Key((int,), 1536, nullable=True, positive=True),
    "qk_nope_head_dim": Key((int,), 128, positive=True),
    "qk_rope_head_dim": Key((int,), 64, positive=True),
    "qk_head_dim": Key((int,), None, nullable=True, positive=True),
    "v_head_dim": Key((int,), 128, positive=True),
    "attention_bias": Key((bool,), False),
    "pretraining_tp": Key((int,), 1, nullable=True, accepted=(1, None)),
    "num_experts_per_tok": Key((int,), positive=True),
    "n_routed_experts": Key((int,), positive=True),
    "n_group": Key((int,), None, nullable=True, positive=True),
    "topk_group": Key((int,), None, nullable=True, positive=True),
    "moe_intermediate_size": Key((int,), positive=True),
    "routed_scaling_factor": Key((int, float), 1.0),
    "moe_layer_freq": Key((int,), 1, accepted=(1,)),
}
DEEPSEEK_IGNORED = {
    "output_router_logits": "chooses what transformers returns; in these models it adds no loss",
    "aux_loss_alpha": "transformers has no loss of this name; router={'seq_aux_loss': ...} asks for one",
    "seq_aux": "says which loss aux_loss_alpha belongs to",
    "ep_size": "how the first release spread experts over ranks",
}


def check_deepseek(title: str, values: Values) -> None:
    """Raise ConfigError unless numbers and sizes of heads fit each other."""
    heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    size = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
    problems = []
    if kv_heads not in (None, heads):
        problems.append(f"num_key_value_heads={kv_heads}: latent attention has as many as num_attention_heads={heads}")
    if values["qk_head_dim"] not in (None, size):
        problems.append(f"qk_head_dim={values['qk_head_dim']} is not qk_nope_head_dim + qk_rope_head_dim = {size}")
    if problems:
        raise ConfigError(f"cannot read {title}:\n" + "\n".join(f"  {problem}" for problem in problems))


def latent_rope(title: str, values: Values, head_size: int, ignore: Sequence[str]) -> Ropes:
    """The rotation of those features of heads that have RoPE."""
    return ((MAIN, read_rope(title, values, values["qk_rope_head_dim"], ignore)),)


def latent_attention(values: Values, *, interleaved: bool) -> LatentAttentionConfig:
    """The attention that the keys describe; mscale_all_dim of YaRN increases its scale (arXiv:2309.00071, eq. 22)."""
    rope = (values["rope_scaling"] or {}) | (values["rope_parameters"] or {})
    scale = (values["qk_nope_head_dim"] + values["qk_rope_head_dim"]) ** -0.5
    factor = rope.get("factor") or 1.0
    if rope.get("mscale_all_dim") and factor > 1:
        scale *= (0.1 * rope["mscale_all_dim"] * math.log(factor) + 1.0) ** 2
    return LatentAttentionConfig(
        num_heads=values["num_attention_heads"],
        kv_rank=values["kv_lora_rank"],
        nope_size=values["qk_nope_head_dim"],
        rope_size=values["qk_rope_head_dim"],
        v_size=values["v_head_dim"],
        q_rank=values["q_lora_rank"],
        scale=scale,
        interleaved=interleaved,
        bias=values["attention_bias"],
    )


def _settings(title: str, values: Values, plain: Plain) -> DecoderConfig:
    check_deepseek(title, values)
    mlp = replace(plain.mlp, bias=values["mlp_bias"])
    grouped = values["topk_method"] == "group_limited_greedy"
    experts = MoeConfig(
        num_experts=values["n_routed_experts"],
        top_k=values["num_experts_per_tok"],
        mlp_size=values["moe_intermediate_size"],
        activation=values["hidden_act"],
        normalise=False,
        groups=(values["n_group"] or 1) if grouped else 1,
        groups_kept=(values["topk_group"] or 1) if grouped else 1,
        group_best=1,
        scale=float(values["routed_scaling_factor"]),
        shared=MlpConfig(
            values["moe_intermediate_size"] * values["n_shared_experts"], values["hidden_act"], bias=values["mlp_bias"]
        ),
    )
    dense, num_layers = min(values["first_k_dense_replace"], plain.num_layers), plain.num_layers
    attention = latent_attention(values, interleaved=True)
    return plain.stack(attention, [mlp if i < dense else experts for i in range(num_layers)])


DEEPSEEK_V2 = Architecture(
    name="deepseek_v2",
    hf_class="DeepseekV2ForCausalLM",
    keys={
        **DEEPSEEK_KEYS,
        "n_routed_experts": Key((int,), 64, positive=True),
        "n_shared_experts": Key((int,), 2, positive=True),
        "moe_intermediate_size": Key((int,), 1407, positive=True),
        "first_k_dense_replace": Key((int,), 0),
        "topk_method": Key((str,), "greedy", accepted=("greedy", "group_limited_greedy")),
        "scoring_func": Key((str,), "softmax", accepted=("softmax",)),
        "norm_topk_prob": Key((bool,), False, nullable=True, accepted=(False, None)),  # transformers does not normalise
        "mlp_bias": Key((bool,), False),
    },
    settings=_settings,
    names=DEEPSEEK_NAMES,
    ignored=DEEPSEEK_IGNORED,
    ropes=latent_rope,
)
