"""Causal models of transformers that mpar has no declaration of, with tiny configs, and those that it refuses."""

_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128, "initializer_range": 0.2}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_PLAIN = {**_SIZES, **_IDS, "intermediate_size": 96, "max_position_embeddings": 64}
_GROUPED = {**_PLAIN, "num_key_value_heads": 2}

EXACT = {
    "arcee": _GROUPED,
    "biogpt": {**_PLAIN, "layerdrop": 0.0},
    "cohere": _GROUPED,
    "ernie4_5": {**_GROUPED, "head_dim": 16},
    "exaone4": {**_GROUPED, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "glm4": {**_GROUPED, "head_dim": 16},
    "gpt_neox": _PLAIN,
    "granite": _GROUPED,
    "opt": {**_SIZES, **_IDS, "ffn_dim": 96, "word_embed_proj_dim": 64, "max_position_embeddings": 64, "init_std": 0.2},
    "olmoe": {**_PLAIN, "num_experts": 4, "num_experts_per_tok": 2},
    "stablelm": _GROUPED,
}
"""By model type: those whose logits and gradients equal transformers' own."""

REFUSED = {
    "ctrl": ({"n_embd": 64, "n_head": 4, "n_layer": 2, "dff": 96, "vocab_size": 128}, "modified inplace"),
    "jetmoe": ({**_PLAIN, "num_key_value_heads": 2, "kv_channels": 16, "num_local_experts": 4}, "from the data of a tensor"),
}
"""By model type: a config, and what the refusal says."""
