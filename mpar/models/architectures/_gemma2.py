"""Gemma 2 (arXiv:2408.00118): norms before and after every part, soft caps, windows in every other layer, scaled embeddings."""

from dataclasses import replace

from mpar.models.architectures._architecture import Architecture, Plain, windowed
from mpar.models.architectures._llama import LLAMA_NAMES
from mpar.models.architectures.keys import COMMON_KEYS, Key, Values, windows_of
from mpar.models.decoder import DecoderConfig

__all__ = ["GEMMA2", "GEMMA2_NAMES", "GEMMA_IGNORED", "GEMMA_KEYS", "gemma_plain"]

_BLOCK = "model.layers.{i}"
GEMMA2_NAMES = {
    **LLAMA_NAMES,
    "layers.{i}.attn_post_norm_D": (f"{_BLOCK}.post_attention_layernorm.weight", "d -> d"),
    "layers.{i}.mlp_norm_D": (f"{_BLOCK}.pre_feedforward_layernorm.weight", "d -> d"),
    "layers.{i}.mlp_post_norm_D": (f"{_BLOCK}.post_feedforward_layernorm.weight", "d -> d"),
}
_CAP = Key((int, float), None, nullable=True, positive=True)
GEMMA_KEYS = {
    **{name: key for name, key in COMMON_KEYS.items() if name != "hidden_act"},
    "num_key_value_heads": Key((int,), 4, positive=True),
    "head_dim": Key((int,), 256, positive=True),
    "hidden_activation": Key((str,), "gelu_pytorch_tanh", accepted=COMMON_KEYS["hidden_act"].accepted),
    "tie_word_embeddings": Key((bool,), True),
    "attention_bias": Key((bool,), False),
    "query_pre_attn_scalar": Key((int, float), 256, positive=True),
    "sliding_window": Key((int,), 4096, nullable=True, positive=True),
    "layer_types": Key((list,), None, nullable=True),
    "final_logit_softcapping": _CAP,
    "attn_logit_softcapping": _CAP,
    "use_bidirectional_attention": Key((bool,), None, nullable=True, accepted=(False, None)),
}
GEMMA_IGNORED = {"hidden_act": "transformers reads hidden_activation and not this key, which older configs have too"}


def gemma_plain(values: Values, plain: Plain) -> Plain:
    """What all Gemmas have in common."""
    bias, scale = values["attention_bias"], values["query_pre_attn_scalar"] ** -0.5
    return replace(
        plain,
        decoder=replace(
            plain.decoder, embed_scale=values["hidden_size"] ** 0.5, logits_soft_cap=values["final_logit_softcapping"]
        ),
        norm=replace(plain.norm, offset=1.0),
        heads=replace(plain.attention, qkv_bias=bias, o_bias=bias, scale=scale),
    )


def _settings(title: str, values: Values, plain: Plain) -> DecoderConfig:
    plain = gemma_plain(values, plain)
    attention = replace(plain.attention, soft_cap=values["attn_logit_softcapping"])
    kinds = values["layer_types"]
    if kinds is None:
        kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(plain.num_layers)]
    return plain.stack(windowed(attention, windows_of(title, values, kinds)), norms="both")


GEMMA2 = Architecture(
    name="gemma2",
    hf_class="Gemma2ForCausalLM",
    keys={
        **GEMMA_KEYS,
        "final_logit_softcapping": Key((int, float), 30.0, nullable=True, positive=True),
        "attn_logit_softcapping": Key((int, float), 50.0, nullable=True, positive=True),
    },
    settings=_settings,
    names=GEMMA2_NAMES,
    words={"hidden_act": "hidden_activation"},
    ignored=GEMMA_IGNORED,
)
