"""Architecture: what tells one Hugging Face model type from another; the table of those that are known."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpar.errors import ConfigError, UnknownNameError
from mpar.models._decoder import DecoderConfig
from mpar.models._hf_config import Key, read_config, read_rope

__all__ = ["ARCHITECTURES", "Architecture", "architecture", "decoder_config"]

ARCHITECTURES: dict[str, "Architecture"] = {}


@dataclass(frozen=True)
class Architecture:
    """One model type.

    hf_class: the class in transformers.        keys: what its config may hold.
    settings: `fn(title, values) -> dict` gives the fields of DecoderConfig in which it differs from the plain decoder.
    names:    path of a leaf -> (name of the stored tensor, transform); `{i}` is the layer.
    norm_eps: the key of the norms' eps.
    absent:   names that old or tied checkpoints may hold and that carry nothing.
    """

    name: str
    hf_class: str
    keys: Mapping[str, Key]
    settings: Callable[[str, Mapping[str, Any]], dict[str, Any]]
    names: Mapping[str, tuple[str, str]]
    norm_eps: str = "rms_norm_eps"
    absent: tuple[str, ...] = ("model.layers.{i}.self_attn.rotary_emb.inv_freq",)

    def __post_init__(self) -> None:
        ARCHITECTURES[self.name] = self


def architecture(raw: Mapping[str, Any]) -> Architecture:
    """The architecture that a config names by model_type and architectures. Raises UnknownNameError with the known ones."""
    kind, classes = raw.get("model_type"), raw.get("architectures") or []
    known = ", ".join(f"{a.name} ({a.hf_class})" for a in sorted(ARCHITECTURES.values(), key=lambda a: a.name))
    found = ARCHITECTURES.get(kind) if isinstance(kind, str) else None
    if found is None or (classes and classes != [found.hf_class]):
        raise UnknownNameError(f"cannot build a model of model_type={kind!r}, architectures={classes}; known ones: {known}")
    return found


def decoder_config(raw: Mapping[str, Any], ignore: Sequence[str], vocab_multiple: int, logits_chunk: int | None) -> DecoderConfig:
    """The mathematics that a Hugging Face config describes. Raises ConfigError with everything that is wrong with it."""
    found = architecture(raw)
    title = f"the config of a {found.name}"
    values = read_config(title, raw, found.keys, ignore)
    heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"] or values["num_attention_heads"]
    head_size = values["head_dim"] or values["hidden_size"] // heads
    problems = []
    if heads % kv_heads:
        problems.append(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    if not values["head_dim"] and values["hidden_size"] % heads:
        problems.append(
            f"hidden_size={values['hidden_size']} is not a multiple of num_attention_heads={heads}, and head_dim is not given"
        )
    if head_size % 2:
        problems.append(f"head_dim={head_size} is odd; RoPE turns pairs")
    for name, value in (("vocab_multiple", vocab_multiple), ("logits_chunk", logits_chunk)):
        if value is not None and value < 1:
            problems.append(f"{name}={value}: must be a positive int")
    if problems:
        raise ConfigError(f"cannot read {title}:\n" + "\n".join(f"  {problem}" for problem in problems))
    plain = {
        "vocab_size": values["vocab_size"],
        "hidden_size": values["hidden_size"],
        "mlp_size": values["intermediate_size"],
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_size": head_size,
        "windows": (None,) * values["num_hidden_layers"],
        "rope": read_rope(title, values, head_size, ignore),
        "activation": values["hidden_act"],
        "norm_eps": values[found.norm_eps],
        "initializer_range": values["initializer_range"],
        "tied": values["tie_word_embeddings"],
        "vocab_multiple": vocab_multiple,
        "logits_chunk": logits_chunk,
    }
    return DecoderConfig(**(plain | found.settings(title, values)))
