"""GPT-2 (Radford et al. 2019): learned positions, layer norms and biases throughout, a feed-forward layer without gate."""

from dataclasses import replace

from mpar.models.architectures._architecture import Architecture, Plain, no_rope
from mpar.models.architectures.keys import COMMON_KEYS, Key, Values
from mpar.models.decoder import DecoderConfig
from mpar.models.layers import MlpConfig

__all__ = ["GPT2"]

_BLOCK = "transformer.h.{i}"
_QKV = f"{_BLOCK}.attn.c_attn"
GPT2_NAMES = {
    "embed.table_VD": ("transformer.wte.weight", "v d -> v d"),
    "embed.positions_SD": ("transformer.wpe.weight", "s d -> s d"),
    "layers.{i}.attn_norm_D": (f"{_BLOCK}.ln_1.weight", "d -> d"),
    "layers.{i}.attn_norm_bias_D": (f"{_BLOCK}.ln_1.bias", "d -> d"),
    "layers.{i}.attention.q_DNH": (f"{_QKV}.weight", "d +(n h) -> d n h"),
    "layers.{i}.attention.k_DKH": (f"{_QKV}.weight", "d +(k h) -> d k h"),
    "layers.{i}.attention.v_DKH": (f"{_QKV}.weight", "d +(k h) -> d k h"),
    "layers.{i}.attention.o_NHD": (f"{_BLOCK}.attn.c_proj.weight", "(n h) d -> n h d"),
    "layers.{i}.attention.q_bias_NH": (f"{_QKV}.bias", "+(n h) -> n h"),
    "layers.{i}.attention.k_bias_KH": (f"{_QKV}.bias", "+(k h) -> k h"),
    "layers.{i}.attention.v_bias_KH": (f"{_QKV}.bias", "+(k h) -> k h"),
    "layers.{i}.attention.o_bias_D": (f"{_BLOCK}.attn.c_proj.bias", "d -> d"),
    "layers.{i}.mlp_norm_D": (f"{_BLOCK}.ln_2.weight", "d -> d"),
    "layers.{i}.mlp_norm_bias_D": (f"{_BLOCK}.ln_2.bias", "d -> d"),
    "layers.{i}.mlp.up_DF": (f"{_BLOCK}.mlp.c_fc.weight", "d f -> d f"),
    "layers.{i}.mlp.up_bias_F": (f"{_BLOCK}.mlp.c_fc.bias", "f -> f"),
    "layers.{i}.mlp.down_FD": (f"{_BLOCK}.mlp.c_proj.weight", "f d -> f d"),
    "layers.{i}.mlp.down_bias_D": (f"{_BLOCK}.mlp.c_proj.bias", "d -> d"),
    "head.norm_D": ("transformer.ln_f.weight", "d -> d"),
    "head.norm_bias_D": ("transformer.ln_f.bias", "d -> d"),
    "head.head_DV": ("lm_head.weight", "v d -> d v"),
}
_WORDS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
_ACTIVATIONS = {"gelu_new": "gelu_pytorch_tanh"}  # the same function under an older name
_SUMMARY = "belongs to the head of multiple-choice models"
_DROPOUT = "published configs have it, but training drops nothing unless it is asked to, by the option dropout"


def _settings(title: str, values: Values, plain: Plain) -> DecoderConfig:
    size, head_size = values["hidden_size"], plain.attention.head_size
    activation_key: str = values["activation_function"]
    activation = _ACTIVATIONS.get(activation_key, activation_key)
    mlp = MlpConfig(values["n_inner"] or 4 * size, activation, gated=False, bias=True)
    scale = head_size**-0.5 if values["scale_attn_weights"] else 1.0
    attention = replace(plain.attention, qkv_bias=True, o_bias=True, rope=None, scale=scale)
    mixers = [attention] * plain.num_layers
    if values["scale_attn_by_inverse_layer_idx"]:
        mixers = [replace(mixer, scale=scale / (i + 1)) for i, mixer in enumerate(mixers)]
    plain = replace(plain, norm=replace(plain.norm, kind="layer_norm", bias=True))
    return replace(plain.stack(mixers, mlp), num_positions=values["n_positions"])


GPT2 = Architecture(
    name="gpt2",
    hf_class="GPT2LMHeadModel",
    keys={
        **{
            name: COMMON_KEYS[name]
            for name in (
                "vocab_size",
                "initializer_range",
                "is_encoder_decoder",
                "add_cross_attention",
                "is_decoder",
                "pruned_heads",
            )
        },
        **{gpt2_key: COMMON_KEYS[common_key] for common_key, gpt2_key in _WORDS.items()},
        "n_inner": Key((int,), None, nullable=True, positive=True),
        "activation_function": Key((str,), "gelu_new", accepted=(*_ACTIVATIONS, *COMMON_KEYS["hidden_act"].accepted)),
        "layer_norm_epsilon": Key((int, float), 1e-5, positive=True),
        "tie_word_embeddings": Key((bool,), True),
        "scale_attn_weights": Key((bool,), True),
        "scale_attn_by_inverse_layer_idx": Key((bool,), False),
    },
    settings=_settings,
    names=GPT2_NAMES,
    words=_WORDS,
    ropes=no_rope,
    norm_eps="layer_norm_epsilon",
    base="transformer.",
    absent=(f"{_BLOCK}.attn.bias", f"{_BLOCK}.attn.masked_bias"),
    ignored={
        **dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), _DROPOUT),
        **dict.fromkeys(("summary_type", "summary_use_proj", "summary_activation"), _SUMMARY),
        **dict.fromkeys(("summary_proj_to_labels", "summary_first_dropout"), _SUMMARY),
        "n_ctx": "an old name of n_positions; the published configs have both",
        "reorder_and_upcast_attn": "changes the order and dtype of attention's operations, not the function",
    },
)
