"""DeepSeek-V3 (arXiv:2412.19437): sigmoid scores, and a bias that balances the choice of experts without a loss."""

from mpar.models.architectures._architecture import Architecture, Plain
from mpar.models.architectures._deepseek_v2 import (
    DEEPSEEK_IGNORED,
    DEEPSEEK_KEYS,
    DEEPSEEK_NAMES,
    check_deepseek,
    latent_attention,
    latent_rope,
)
from mpar.models.architectures.keys import Key, Values
from mpar.models.decoder import DecoderConfig
from mpar.models.layers import MlpConfig, MoeConfig

__all__ = ["DEEPSEEK_V3"]

_NAMES = {
    **DEEPSEEK_NAMES,
    "layers.{i}.mlp.choice_bias_E": ("model.layers.{i}.mlp.gate.e_score_correction_bias", "e -> e"),
}
_MTP = "model.layers.{n}"
MTP_NAMES = {
    **{
        path.replace("layers.{i}.", "mtp.block."): (name.replace("{i}", "{n}"), transform)
        for path, (name, transform) in _NAMES.items()
        if path.startswith("layers.")
    },
    "mtp.embed_norm_D": (f"{_MTP}.enorm.weight", "d -> d"),
    "mtp.hidden_norm_D": (f"{_MTP}.hnorm.weight", "d -> d"),
    "mtp.embed_DD": (f"{_MTP}.eh_proj.weight", "d +c -> c d"),
    "mtp.hidden_DD": (f"{_MTP}.eh_proj.weight", "d +c -> c d"),
    "mtp.norm_D": (f"{_MTP}.shared_head.norm.weight", "d -> d"),
}


def _settings(title: str, values: Values, plain: Plain) -> DecoderConfig:
    check_deepseek(title, values)
    experts = MoeConfig(
        num_experts=values["n_routed_experts"],
        top_k=values["num_experts_per_tok"],
        mlp_size=values["moe_intermediate_size"],
        activation=values["hidden_act"],
        score="sigmoid",
        normalise=bool(values["norm_topk_prob"]),
        groups=values["n_group"] or 1,
        groups_kept=values["topk_group"] or 1,
        scale=float(values["routed_scaling_factor"]),
        choice_bias=True,
        shared=MlpConfig(values["moe_intermediate_size"] * values["n_shared_experts"], values["hidden_act"]),
    )
    dense, num_layers = min(values["first_k_dense_replace"], plain.num_layers), plain.num_layers
    attention = latent_attention(values, interleaved=bool(values["rope_interleave"]))
    return plain.stack(attention, [plain.mlp if i < dense else experts for i in range(num_layers)])


DEEPSEEK_V3 = Architecture(
    name="deepseek_v3",
    hf_class="DeepseekV3ForCausalLM",
    keys={
        **DEEPSEEK_KEYS,
        "num_experts_per_tok": Key((int,), 8, positive=True),
        "n_routed_experts": Key((int,), 256, positive=True),
        "n_shared_experts": Key((int,), 1, positive=True),
        "n_group": Key((int,), 8, nullable=True, positive=True),
        "topk_group": Key((int,), 4, nullable=True, positive=True),
        "moe_intermediate_size": Key((int,), 2048, positive=True),
        "first_k_dense_replace": Key((int,), 3),
        "norm_topk_prob": Key((bool,), True, nullable=True),
        "routed_scaling_factor": Key((int, float), 2.5),
        "rope_interleave": Key((bool,), True, nullable=True),
        "topk_method": Key((str,), "noaux_tc", accepted=("noaux_tc",)),
        "scoring_func": Key((str,), "sigmoid", accepted=("sigmoid",)),
    },
    settings=_settings,
    names={**_NAMES, **MTP_NAMES},
    ignored={
        **DEEPSEEK_IGNORED,
        "num_nextn_predict_layers": "layers after the last one, for further tokens; `mtp_loss_weight` asks for the first of them",
    },
    ropes=latent_rope,
    layers_behind="num_nextn_predict_layers",
)
