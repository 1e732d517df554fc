"""Reading a Hugging Face config.json: every key is used, or in a table of ignored ones with the reason, or an error."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpar.errors import ConfigError
from mpar.models.layers._feed_forward import ACTIVATIONS

__all__ = [
    "COMMON_KEYS",
    "IGNORED_KEYS",
    "REQUIRED",
    "WINDOW_KEYS",
    "Key",
    "is_number",
    "read_config",
    "read_windows",
    "refusal",
    "windows_of",
]

REQUIRED = object()
NUMBER = (int, float)


@dataclass(frozen=True)
class Key:
    """What a key may hold; `default` counts where it is missing, `accepted` (if not empty) are the values implemented."""

    kind: tuple[type, ...]
    default: Any = REQUIRED
    nullable: bool = False
    positive: bool = False
    accepted: tuple[Any, ...] = field(default=())


COMMON_KEYS = {
    "vocab_size": Key((int,), positive=True),
    "hidden_size": Key((int,), positive=True),
    "intermediate_size": Key((int,), positive=True),
    "num_hidden_layers": Key((int,), positive=True),
    "num_attention_heads": Key((int,), positive=True),
    "head_dim": Key((int,), None, nullable=True, positive=True),
    "hidden_act": Key((str,), "silu", accepted=tuple(ACTIVATIONS)),
    "rms_norm_eps": Key(NUMBER, 1e-6, positive=True),
    "initializer_range": Key(NUMBER, 0.02),
    "max_position_embeddings": Key((int,), positive=True),
    "original_max_position_embeddings": Key((int,), None, nullable=True, positive=True),
    "rope_theta": Key(NUMBER, None, nullable=True, positive=True),
    "rope_scaling": Key((dict,), None, nullable=True),
    "rope_parameters": Key((dict,), None, nullable=True),
    "tie_word_embeddings": Key((bool,), False),
    "attention_dropout": Key(NUMBER, 0.0, nullable=True, accepted=(0, None)),
    "is_encoder_decoder": Key((bool,), False, accepted=(False,)),
    "add_cross_attention": Key((bool,), False, accepted=(False,)),
    "is_decoder": Key((bool,), False),
    "pruned_heads": Key((dict,), {}, nullable=True, accepted=({}, None)),
    "partial_rotary_factor": Key(NUMBER, 1.0, nullable=True, accepted=(1, None)),
}

WINDOW_KEYS = {
    "use_sliding_window": Key((bool,), False),
    "sliding_window": Key((int,), 4096, nullable=True, positive=True),
    "max_window_layers": Key((int,), 28),
    "layer_types": Key((list,), None, nullable=True),
}

_NAMES_ONLY = "a name, date or version; it has no influence on the function"
_GENERATION = "an old place for generation settings; generation takes them as arguments"
_OUTPUTS = "chooses what transformers returns, not what the model computes"
_TASK = "belongs to a classification head"
_TOKENS = "the tokenizer and generation read it"
IGNORED_KEYS = {
    **dict.fromkeys(
        ("_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "model_type", "architectures"), _NAMES_ONLY
    ),
    **dict.fromkeys(("torch_dtype", "dtype"), "the dtype is an argument; by default that of the stored tensors"),
    **dict.fromkeys(
        ("_attn_implementation", "_attn_implementation_autoset", "attn_implementation"), "one attention function here"
    ),
    **dict.fromkeys(("use_cache", "return_dict", "output_attentions", "output_hidden_states", "torchscript"), _OUTPUTS),
    **dict.fromkeys(("chunk_size_feed_forward", "use_bfloat16", "tf_legacy_loss"), "memory or other frameworks; same function"),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id"), _TOKENS),
    **dict.fromkeys(("decoder_start_token_id", "tokenizer_class", "prefix"), _TOKENS),
    **dict.fromkeys(("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params"), _TASK),
    **dict.fromkeys(("tie_encoder_decoder", "cross_attention_hidden_size"), "only encoder-decoder models read it"),
    **dict.fromkeys(("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups"), _GENERATION),
    **dict.fromkeys(("diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty"), _GENERATION),
    **dict.fromkeys(("length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"), _GENERATION),
    **dict.fromkeys(("num_return_sequences", "output_scores", "return_dict_in_generate", "forced_bos_token_id"), _GENERATION),
    "cache_implementation": _GENERATION,
    "auto_map": "names code that came with the checkpoint; ours is used",
    **dict.fromkeys(("forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty"), _GENERATION),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), _GENERATION),
}
"""Key to the reason why it is not read."""


def read_config(
    title: str, raw: Mapping[str, Any], keys: Mapping[str, Key], ignore: Sequence[str], ignored: Mapping[str, str] = IGNORED_KEYS
) -> dict[str, Any]:
    """The values of `keys`, defaults filled in; keys of `ignored` and `ignore` are not looked at.

    Raises ConfigError with every unknown key and unusable value of `raw`.
    """
    problems = []
    unknown = sorted(key for key in raw if key not in keys and key not in ignored and key not in ignore)
    if unknown:
        problems.append(f"unknown keys: {', '.join(f'{key}={raw[key]!r}' for key in unknown)}")
    values = {}
    for name, key in keys.items():
        value = raw.get(name, key.default)
        values[name] = value
        if value is REQUIRED:
            problems.append(f"{name} is missing")
        elif name in raw and not _has_kind(value, key):
            problems.append(f"{name}={value!r}: must be {_kinds(key)}")
        elif key.accepted and value not in key.accepted and name not in ignore:
            accepted = ", ".join(repr(item) for item in key.accepted if item is not None)
            problems.append(f"{name}={value!r}: only {accepted} {'is' if ',' not in accepted else 'are'} implemented")
    if problems:
        raise ConfigError(refusal(title, problems, unknown))
    return values


def read_windows(title: str, values: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Per layer the sliding window or None, from layer_types or, without it, from max_window_layers on.

    Raises ConfigError if layer_types does not fit the number of layers or names what is not implemented.
    """
    window = values["sliding_window"] if values["use_sliding_window"] else None
    if values["layer_types"] is None:
        return tuple(window if i >= values["max_window_layers"] else None for i in range(values["num_hidden_layers"]))
    return windows_of(title, values, values["layer_types"])


def windows_of(title: str, values: Mapping[str, Any], kinds: Sequence[str]) -> tuple[int | None, ...]:
    """Per layer the sliding window or None, from the `kinds` of all layers. Raises ConfigError as `read_windows` does."""
    num_layers, window = values["num_hidden_layers"], values["sliding_window"]
    used = values.get("use_sliding_window", True)
    problems = []
    if len(kinds) != num_layers:
        problems.append(f"layer_types has {len(kinds)} entries, num_hidden_layers is {num_layers}")
    strange = sorted({repr(kind) for kind in kinds if kind not in ("full_attention", "sliding_attention")})
    if strange:
        problems.append(f"layer_types has {', '.join(strange)}: only 'full_attention' and 'sliding_attention' are implemented")
    if "sliding_attention" in kinds and (window is None or not used):
        switch = f"use_sliding_window={used}, " if "use_sliding_window" in values else ""
        problems.append(f"layer_types has sliding layers, but {switch}sliding_window={window}")
    if problems:
        raise ConfigError(refusal(title, problems))
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _has_kind(value: Any, key: Key) -> bool:
    if value is None:
        return key.nullable
    if isinstance(value, bool) and bool not in key.kind:
        return False
    if isinstance(value, float) and not math.isfinite(value):
        return False
    fits = isinstance(value, key.kind)
    return fits and not (key.positive and value <= 0)


def is_number(value: Any) -> bool:
    """Whether `value` is a finite number."""
    return isinstance(value, NUMBER) and not isinstance(value, bool) and math.isfinite(value)


def _kinds(key: Key) -> str:
    kinds = " or ".join(kind.__name__ for kind in key.kind)
    return f"{'a positive ' if key.positive else ''}{kinds}{' or null' if key.nullable else ''}"


def refusal(title: str, problems: Sequence[str], unknown: Sequence[str] = ()) -> str:
    """The text of an error with all `problems`, and what to do about unknown keys."""
    lines = "\n".join(f"  {problem}" for problem in problems)
    names = ", ".join(repr(key) for key in unknown)
    way_out = f"\nIf the unknown keys do not change what the model computes, pass ignore=({names},)." if unknown else ""
    return f"cannot read {title}:\n{lines}{way_out}"
