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
