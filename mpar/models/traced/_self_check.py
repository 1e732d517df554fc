"""Self-check: before a traced model is used, a small one of the same config is compared with transformers' own eager code.

Some models ignore how attention is called, or read what tracing cannot see; then logits or gradients differ, and the model is
refused.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mpar.errors import ConfigError
from mpar.models.traced._attention import ATTENTION
from mpar.models.traced._comparison import compared
from mpar.models.traced._model import TracedModel
from mpar.models.traced._skeleton import load_transformers, transformers_config
from mpar.models.traced._traits import Traits

__all__ = ["check_traced", "shrunken"]

_ROWS, _LENGTH = 2, 12
_SIZES = {
    64: ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size"),
    96: ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size", "n_inner"),
    32: ("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank"),
    16: ("head_dim", "v_head_dim", "kv_lora_rank", "qk_nope_head_dim"),
    8: ("qk_rope_head_dim", "rotary_dim"),
    128: ("vocab_size", "max_position_embeddings", "n_positions", "n_ctx"),
    4: ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    2: (
        *("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts", "moe_k"),
        *("n_group", "num_expert_group"),
    ),
    1: ("topk_group",),
    5: ("sliding_window",),
}
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers")
_MOST_LAYERS = 8
_MOST_LAYERS = 8
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")


@functools.lru_cache(maxsize=64)
def check_traced(config_json: str) -> Traits:
    """What rows of the model allow. Raises ConfigError, which says what differs, unless a small model of this config gives the
    logits and gradients of transformers' eager code.

    A model that does not call mpar's attention, or not in a way that it understands, is tried with its own.
    """
    small = json.dumps(shrunken(json.loads(config_json)))
    reasons = []
    for attention in (ATTENTION, "eager"):
        try:
            traits = _checked(TracedModel(small, traits=Traits(attention=attention)))
        except ConfigError as error:
            reasons.append(str(error))
            continue
        return replace(traits, first_position=_after_padding(config_json)) if traits.first_position else traits
    raise ConfigError("\nWith attention of its own: ".join(dict.fromkeys(reasons)))


def _checked(model: TracedModel) -> Traits:
    eager = _eager(model)
    try:
        problems, traits = _compared(model, eager)
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"cannot trace {type(eager).__name__} of transformers: {type(error).__name__}: {error}") from error
    if problems:
        raise ConfigError(
            f"cannot use {type(eager).__name__} by tracing: a small model of this config does not compute what transformers "
            f"{load_transformers().__version__} computes:\n  " + "\n  ".join(problems[:6])
        )
    return traits


def _eager(model: TracedModel) -> Any:
    """transformers' own model of the same config, with random weights."""
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return (
                load_transformers()
                .AutoModelForCausalLM.from_config(
                    transformers_config(model.hf_config_json),
                    attn_implementation="eager",
                    experts_implementation="eager",
                    dtype=torch.float32,
                )
                .eval()
            )
    except Exception as error:
        raise ConfigError(
            f"cannot check this {model.name} model: transformers cannot make a small one of its config "
            f"({type(error).__name__}: {str(error)[:200]})"
        ) from error


def shrunken(raw: Mapping[str, object]) -> dict[str, object]:
    """The config with small sizes. Lists with an entry for each layer become as short as there are layers."""
    config = transformers_config(json.dumps(raw))
    try:
        text = config.get_text_config()
    except ValueError:  # there are several
        text = config.get_text_config(decoder=True)
    full = text.to_dict()
    small = _sizes(full) | _head_sizes(full) | _layer_counts(full)
    small |= {key: min(full[key], 2) for key in _IDS if isinstance(full.get(key), int)}
    small |= {"initializer_range": 0.2}
    nested = next((key for key in getattr(config, "sub_configs", {}) if getattr(config, key, None) is text), None)
    return {**raw, **small} if nested is None else {**raw, nested: {**full, **small}}


def _sizes(full: Mapping[str, Any]) -> dict[str, object]:
    return {
        key: min(size, full[key])
        for size, keys in _SIZES.items()
        for key in keys
        if isinstance(full.get(key), int) and full[key] > 0
    }


def _head_sizes(full: Mapping[str, Any]) -> dict[str, object]:
    """Numbers of heads; and the size of a head, where it is the size of the part that is rotated."""
    small: dict[str, object] = {}
    heads = next((key for key in _HEADS if isinstance(full.get(key), int)), None)
    if heads is not None:
        count = small[heads] = min(4, full[heads])
        for key in (key for key in _KV_HEADS if isinstance(full.get(key), int)):
            small[key] = count if full[key] == full[heads] else 1 if full[key] == 1 else min(2, full[key])
    if full.get("head_dim") is not None and full.get("head_dim") == full.get("qk_rope_head_dim"):
        small["head_dim"] = 8
    return small


def _layer_counts(full: Mapping[str, Any]) -> dict[str, object]:
    """Numbers of layers: so many that every sort of layer is among the first, if that is no more than eight."""
    small: dict[str, object] = {}
    for key in (key for key in _LAYERS if isinstance(full.get(key), int)):
        count = full[key]
        lists = {name: value for name, value in full.items() if isinstance(value, list) and len(value) == count}
        firsts = [value.index(sort) + 1 for value in lists.values() for sort in value]
        num_layers = min(count, max([4, *(first for first in firsts if first <= _MOST_LAYERS)]))
        small |= {key: num_layers, **{name: value[:num_layers] for name, value in lists.items()}}
        if isinstance(full.get("per_layer_config"), dict):
            kept = {index: each for index, each in full["per_layer_config"].items() if int(index) < num_layers}
            small["per_layer_config"] = {index: {**each, **_sizes(each), **_head_sizes(each)} for index, each in kept.items()}
    return small


def _compared(model: TracedModel, eager: Any) -> tuple[list[str], Traits]:
    """A line for everything in which the two differ, and what rows allow."""
    generator = torch.Generator().manual_seed(1)
    stored = {name: x for name, x in eager.state_dict(keep_vars=True).items() if name in model.imported.skeleton.parameters}
    tokens = torch.randint(3, min(model.vocab_size, 128), (_ROWS, _LENGTH), generator=generator)

    def logits(tokens: Tensor) -> Tensor:
        return eager(tokens, use_cache=False).logits

    return compared(model, stored, logits, tokens, _after_padding(model.hf_config_json))


def _after_padding(config_json: str) -> int:
    """Where models count positions from the id of padding on, the position of the first token; 0 without such an id."""
    padding = transformers_config(config_json).get_text_config().pad_token_id
    return 0 if padding is None else padding + 1
