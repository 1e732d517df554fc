"""The peers' config with experts in place of each feed-forward layer."""

from dataclasses import dataclass, fields
from typing import Any

__all__ = ["ExpertsConfig", "with_experts"]


@dataclass(frozen=True)
class ExpertsConfig:
    """The peers' config, and how many experts of which size there are."""

    d: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    seq: int
    batch: int
    experts: int
    top_k: int

    def hf_config(self, norm_eps: float, rope_theta: float) -> dict[str, Any]:
        """The config.json of the same model: Mixtral's, without a side loss."""
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "hidden_size": self.d,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.seq,
            "rms_norm_eps": norm_eps,
            "rope_theta": rope_theta,
            "num_local_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "router_aux_loss_coef": 0.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
        }


def with_experts(cfg: Any, experts: int, top_k: int) -> ExpertsConfig:
    """The peers' config with experts of half its hidden size."""
    shared = {field.name: getattr(cfg, field.name) for field in fields(ExpertsConfig) if hasattr(cfg, field.name)}
    return ExpertsConfig(**shared | {"ffn": cfg.ffn // 2, "experts": experts, "top_k": top_k})
