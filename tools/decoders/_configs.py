"""Tiny configs: for a model type, a config whose model has four layers at most and some thousand parameters."""

from collections.abc import Mapping

from mpar.models.architectures import ARCHITECTURES
from mpar.models.traced import load_transformers, shrunken

__all__ = ["causal_types", "tiny_config"]

_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER = {"is_decoder": True}
_BERTS = "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta"
_BERTS += " roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod"

_TINY: Mapping[str, Mapping[str, object]] = {
    **{name: _DECODER for name in _BERTS.split()},
    "cpmant": {"vocab_size": 128, "dim_ff": 96, "dim_head": 16, "prompt_types": 2, "prompt_length": 4, "segment_types": 4},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {
        **{"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
        "first_k_dense_replace": 1,
    },
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "inkling_text": {"unpadded_vocab_size": 128},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "longcat_flash": {"ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "zero_expert_num": 2, "num_layers": 2},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "reformer": {"is_decoder": True},
    "roc_bert": {
        **{"pronunciation_vocab_size": 32, "shape_vocab_size": 32, "pronunciation_embed_dim": 16, "shape_embed_dim": 16},
        **_DECODER,
    },
    "xlm": {"emb_dim": 64, "n_words": 128, "vocab_size": 128, "causal": True},
    "xmod": {**_DECODER, "default_language": "en_XX", "languages": ["en_XX"]},
}
"""What a type needs besides the sizes that `shrunken` gives to its default config."""


def causal_types() -> list[str]:
    """The causal types of transformers without those that mpar has declarations of."""
    load_transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in ARCHITECTURES)


def tiny_config(model_type: str) -> dict[str, object]:
    """The config of a model that takes seconds to check."""
    return shrunken({"model_type": model_type, **_IDS, **_TINY.get(model_type, {})}) | _TINY.get(model_type, {})
