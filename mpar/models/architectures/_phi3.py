"""Phi-3 (arXiv:2404.14219): a Llama whose projections are stored together; LongRoPE; RoPE on a share of each head's features."""

from collections.abc import Sequence
from dataclasses import replace

from mpar.models.architectures._architecture import Architecture, Plain, Ropes
from mpar.models.architectures._llama import LLAMA_NAMES
from mpar.models.architectures.keys import COMMON_KEYS, Key, Values, read_rope
from mpar.models.decoder import DecoderConfig
from mpar.models.layers import MAIN

__all__ = ["PHI3"]

_BLOCK = "model.layers.{i}"
PHI3_NAMES = {
    **LLAMA_NAMES,
    "layers.{i}.attention.q_DNH": (f"{_BLOCK}.self_attn.qkv_proj.weight", "+(n h) d -> d n h"),
    "layers.{i}.attention.k_DKH": (f"{_BLOCK}.self_attn.qkv_proj.weight", "+(k h) d -> d k h"),
    "layers.{i}.attention.v_DKH": (f"{_BLOCK}.self_attn.qkv_proj.weight", "+(k h) d -> d k h"),
    "layers.{i}.mlp.gate_DF": (f"{_BLOCK}.mlp.gate_up_proj.weight", "+f d -> d f"),
    "layers.{i}.mlp.up_DF": (f"{_BLOCK}.mlp.gate_up_proj.weight", "+f d -> d f"),
}
_NO_DROPOUT = Key((int, float), 0.0, accepted=(0,))
_NO_BIAS = Key((bool,), False, accepted=(False,))


def _ropes(title: str, values: Values, head_size: int, ignore: Sequence[str]) -> Ropes:
    aliases = {"su": "longrope", "yarn": "longrope"}  # names in the first checkpoints
    return ((MAIN, read_rope(title, values, head_size, ignore, partial=True, aliases=aliases)),)


def _settings(title: str, values: Values, plain: Plain) -> DecoderConfig:
    return plain.stack(replace(plain.attention, window=values["sliding_window"]))


PHI3 = Architecture(
    name="phi3",
    hf_class="Phi3ForCausalLM",
    keys={
        **COMMON_KEYS,
        "num_key_value_heads": Key((int,), None, nullable=True, positive=True),
        "rms_norm_eps": Key((int, float), 1e-5, positive=True),
        "original_max_position_embeddings": Key((int,), 4096, positive=True),
        "partial_rotary_factor": Key((int, float), 1.0, nullable=True, positive=True),
        "sliding_window": Key((int,), None, nullable=True, positive=True),
        "resid_pdrop": _NO_DROPOUT,
        "embd_pdrop": _NO_DROPOUT,
        "attention_bias": _NO_BIAS,
        "mlp_bias": _NO_BIAS,
        "lm_head_bias": _NO_BIAS,
    },
    settings=_settings,
    names=PHI3_NAMES,
    ropes=_ropes,
    ignored={
        "full_attn_mod": "Phi-4-mini has it; no code of transformers reads it",
        "interpolate_factor": "Phi-4-mini has it; no code of transformers reads it",
    },
)
