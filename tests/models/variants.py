"""Tiny configs of every architecture, and the variants in which it is compared with transformers.

To test a new architecture, add a line to KINDS and its variants to VARIANTS: parity of logits and gradients, both layouts of the
config, import and export, greedy generation, packed documents and what else is said of all models is then tested by itself.
"""

from dataclasses import dataclass, field
from typing import Any

import transformers

BASE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Kind:
    """One architecture of transformers: the names of its classes, and a tiny config in its own words.

    rotates: whether configs describe a RoPE, which older versions wrote differently. tolerance: of gradients, relative.
    """

    config: str
    model: str
    base: dict[str, Any] = field(default_factory=lambda: BASE)
    rotates: bool = True

    def make_config(self, **changes: Any) -> Any:
        """The config of transformers."""
        return getattr(transformers, self.config)(**{**self.base, **changes})


def _kind(name: str, **base: Any) -> Kind:
    no_padding = {"pad_token_id": None}  # else transformers gives the row of this id no gradient
    return Kind(f"{name}Config", f"{name}ForCausalLM", {**BASE, **no_padding, **base})


LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 10,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
}
SPARSE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
MAMBA2 = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "head_dim": 16,
    "state_size": 6,
    "n_groups": 2,
    "chunk_size": 8,
}
KINDS = {
    "deepseek_v2": _kind("DeepseekV2", **LATENT),
    "deepseek_v3": _kind("DeepseekV3", **LATENT, n_group=4, topk_group=2),
    "gemma2": _kind("Gemma2", head_dim=8, query_pre_attn_scalar=8, sliding_window=5),
    "gemma3_text": Kind(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            **BASE,
            "pad_token_id": None,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gpt2": Kind("GPT2Config", "GPT2LMHeadModel", GPT2, rotates=False),
    "gpt_oss": _kind("GptOss", head_dim=8, sliding_window=5, num_local_experts=4, num_experts_per_tok=2),
    "llama": _kind("Llama"),
    "mamba2": Kind("Mamba2Config", "Mamba2ForCausalLM", MAMBA2, rotates=False),
    "mistral": _kind("Mistral", sliding_window=5),
    "mixtral": _kind("Mixtral", num_local_experts=4),
    "olmo2": _kind("Olmo2"),
    "phi3": _kind("Phi3", original_max_position_embeddings=16),
    "qwen2": _kind("Qwen2"),
    "qwen2_moe": _kind("Qwen2Moe", **SPARSE, shared_expert_intermediate_size=24),
    "qwen3": _kind("Qwen3", head_dim=8),
    "qwen3_moe": _kind("Qwen3Moe", **SPARSE, head_dim=8),
    "starcoder2": _kind("Starcoder2"),
}

WINDOWS = {"use_sliding_window": True, "sliding_window": 5}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MSCALE = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2, "rope_theta": 100.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.3, 1.7, 2.0], "long_factor": [1.0, 2.5, 6.0, 11.0], "rope_theta": 100.0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_multi_query": ("llama", {"num_key_value_heads": 1}),
    "llama_multi_head": ("llama", {"num_key_value_heads": 4}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_head_dim": ("llama", {"head_dim": 12}),
    "llama_gelu": ("llama", {"hidden_act": "gelu"}),
    "llama_gelu_tanh": ("llama", {"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-2}),
    "llama_vocab_128": ("llama", {"vocab_size": 128}),
    "llama_theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama_linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}}),
    "llama_dynamic_short": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1000.0}}),
    "llama_dynamic_long": (
        "llama",
        {"max_position_embeddings": 16, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1000.0}},
    ),
    "llama_yarn": ("llama", {"rope_parameters": {**YARN, "rope_theta": 1000.0}}),
    "llama_yarn_factor": (
        "llama",
        {
            "head_dim": 32,
            "rope_parameters": {**YARN, "attention_factor": 0.7, "beta_fast": 1.5, "truncate": False, "rope_theta": 100.0},
        },
    ),
    "llama_yarn_mscale": ("llama", {"rope_parameters": {**YARN, "mscale": 1.3, "mscale_all_dim": 0.6, "rope_theta": 1000.0}}),
    "llama_31": ("llama", {"head_dim": 16, "rope_parameters": {**LLAMA3, "rope_theta": 100.0}}),
    "llama_longrope": ("llama", {"rope_parameters": {**LONG, "factor": 3.0, "original_max_position_embeddings": 30}}),
    "qwen2": ("qwen2", {}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_windows": ("qwen2", {**WINDOWS, "max_window_layers": 1}),
    "qwen2_layer_types": ("qwen2", {**WINDOWS, "layer_types": ["sliding_attention", "full_attention"]}),
    "qwen3": ("qwen3", {}),
    "qwen3_head_dim": ("qwen3", {"head_dim": 12, "tie_word_embeddings": True}),
    "qwen3_bias": ("qwen3", {"attention_bias": True}),
    "qwen3_windows": ("qwen3", {**WINDOWS, "layer_types": ["sliding_attention", "full_attention"]}),
    "qwen3_yarn": ("qwen3", {"rope_parameters": {**YARN, "rope_theta": 1000.0}}),
    "starcoder2": ("starcoder2", {}),
    "starcoder2_untied": ("starcoder2", {"tie_word_embeddings": False, "norm_epsilon": 1e-2}),
    "starcoder2_no_biases": ("starcoder2", {"use_bias": False, "num_key_value_heads": 4}),
    "starcoder2_window": ("starcoder2", {"sliding_window": 5}),
    "starcoder2_silu": ("starcoder2", {"hidden_act": "silu"}),
    "starcoder2_gelu": ("starcoder2", {"hidden_act": "gelu"}),
    "mamba2": ("mamba2", {}),
    "mamba2_tied_one_group": ("mamba2", {"tie_word_embeddings": True, "n_groups": 1, "chunk_size": 256}),
    "mamba2_biases": ("mamba2", {"use_bias": True, "use_conv_bias": False, "conv_kernel": 2}),
    "mamba2_limits": ("mamba2", {"time_step_limit": (0.2, 1.5), "layer_norm_epsilon": 1e-2, "expand": 3, "num_heads": 6}),
    "mistral": ("mistral", {}),
    "mistral_no_window": ("mistral", {"sliding_window": None, "head_dim": 12, "num_key_value_heads": 1}),
    "gemma2": ("gemma2", {}),
    "gemma2_untied_biases": ("gemma2", {"tie_word_embeddings": False, "attention_bias": True, "num_hidden_layers": 3}),
    "gemma2_caps": ("gemma2", {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 20}),
    "gemma2_no_caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None, "rms_norm_eps": 1e-2}),
    "gemma2_uncapped_logits": ("gemma2", {"attn_logit_softcapping": 1.5, "final_logit_softcapping": None}),
    "gemma2_full_first": ("gemma2", {"layer_types": ["full_attention", "sliding_attention"], "hidden_activation": "silu"}),
    "gemma3": ("gemma3_text", {}),
    "gemma3_pattern": ("gemma3_text", {"layer_types": None, "sliding_window_pattern": 2, "num_hidden_layers": 3}),
    "gemma3_wide": ("gemma3_text", {"sliding_window": 64}),
    "gemma3_caps": ("gemma3_text", {"final_logit_softcapping": 3.0, "attention_bias": True, "query_pre_attn_scalar": 20}),
    "gemma3_ropes": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            }
        },
    ),
    "gpt2": ("gpt2", {}),
    "gpt2_untied": ("gpt2", {"tie_word_embeddings": False, "n_inner": 40, "layer_norm_epsilon": 1e-2}),
    "gpt2_scales": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "activation_function": "gelu"}),
    "gpt2_no_scale": ("gpt2", {"scale_attn_weights": False, "reorder_and_upcast_attn": True}),
    "phi3": ("phi3", {}),
    "phi3_multi_head": ("phi3", {"num_key_value_heads": 4, "tie_word_embeddings": True, "sliding_window": 5}),
    "phi3_partial": ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}}),
    "phi3_long": ("phi3", {"rope_parameters": LONG}),
    "phi3_short": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 40}),
    "phi3_long_partial": (
        "phi3",
        {
            "hidden_size": 64,
            "rope_parameters": {**LONG, "partial_rotary_factor": 0.5, "attention_factor": 1.2},
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo2_multi_head": ("olmo2", {"num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": True}),
    "olmo2_eps": ("olmo2", {"rms_norm_eps": 1e-1, "num_key_value_heads": 1}),
    "mixtral": ("mixtral", {}),
    "mixtral_window": ("mixtral", {"sliding_window": 5, "num_experts_per_tok": 3, "head_dim": 12, "hidden_act": "gelu"}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe_some": (
        "qwen2_moe",
        {"num_hidden_layers": 4, "decoder_sparse_step": 2, "norm_topk_prob": True, "qkv_bias": False},
    ),
    "qwen2_moe_windows": ("qwen2_moe", {**WINDOWS, "mlp_only_layers": [0], "num_hidden_layers": 3, "max_window_layers": 2}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe_some": ("qwen3_moe", {"mlp_only_layers": [1], "norm_topk_prob": True, "attention_bias": True}),
    "qwen3_moe_windows": ("qwen3_moe", {**WINDOWS, "tie_word_embeddings": True}),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2_groups": (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 3.0, "mlp_bias": True},
    ),
    "deepseek_v2_no_q_latent": ("deepseek_v2", {"q_lora_rank": None, "attention_bias": True, "rope_parameters": MSCALE}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3_yarn": ("deepseek_v3", {"rope_parameters": MSCALE, "first_k_dense_replace": 0, "n_shared_experts": 2}),
    "deepseek_v3_halves": ("deepseek_v3", {"rope_interleave": False, "norm_topk_prob": False, "attention_bias": True}),
    "deepseek_v3_no_groups": ("deepseek_v3", {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2}),
    "gpt_oss": ("gpt_oss", {"rope_parameters": {**YARN, "truncate": False, "rope_theta": 1000.0}}),
    "gpt_oss_no_biases": ("gpt_oss", {"attention_bias": False, "swiglu_limit": 0.7, "swiglu_alpha": 1.2}),
    "gpt_oss_full_first": ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention"], "num_experts_per_tok": 1}),
}
"""Name to kind and changes of its tiny config."""


def old_layout(config: dict[str, Any]) -> dict[str, Any]:
    """A config of transformers 5 as version 4 wrote it: rope_theta, rope_scaling, and for Gemma 3 rope_local_base_freq."""
    config = dict(config)
    rope = config.pop("rope_parameters")
    config["torch_dtype"] = config.pop("dtype", None)
    if "sliding_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    rope = dict(rope)
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = {"type": kind, **rope} if kind != "default" else None
    return config
