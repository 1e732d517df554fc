"""Reading a Hugging Face config: finding its architecture, and the decoder that it describes."""

from collections.abc import Mapping, Sequence

from mpar.errors import ConfigError, UnknownNameError
from mpar.models.architectures._architecture import Architecture, Plain
from mpar.models.architectures.keys import IGNORED_KEYS, Values, read_config, refusal
from mpar.models.decoder import DecoderConfig
from mpar.models.layers import AttentionConfig, MlpConfig, NormConfig

__all__ = ["find_architecture", "read_decoder"]


def find_architecture(raw: Mapping[str, object], table: Mapping[str, Architecture]) -> Architecture:
    """The architecture that a config names by its keys model_type and architectures.

    Raises UnknownNameError, which lists those of `table`, if it is not among them.
    """
    kind, classes = raw.get("model_type"), raw.get("architectures") or []
    found = table.get(kind) if isinstance(kind, str) else None
    if found is None or (classes and classes != [found.hf_class]):
        known = ", ".join(f"{a.name} ({a.hf_class})" for a in sorted(table.values(), key=lambda a: a.name))
        raise UnknownNameError(f"cannot build a model of model_type={kind!r}, architectures={classes}; known ones: {known}")
    return found


def read_decoder(raw: Mapping[str, object], architecture: Architecture, ignore: Sequence[str] = ()) -> DecoderConfig:
    """The decoder that a Hugging Face config describes; keys in `ignore` are not read.

    Raises ConfigError with everything that is wrong with the config.
    """
    title = f"the config of a {architecture.name}"
    given = read_config(title, raw, architecture.keys, ignore, {**IGNORED_KEYS, **architecture.ignored})
    values = {**given, **{common_key: given[config_key] for common_key, config_key in architecture.words.items()}}
    heads = _heads(title, values, architecture.words) if "num_attention_heads" in values else None
    decoder = DecoderConfig(
        vocab_size=values["vocab_size"],
        hidden_size=values["hidden_size"],
        layers=(),
        ropes=architecture.ropes(title, values, heads.head_size if heads else 0, ignore),
        initializer_range=values["initializer_range"],
        tied=values["tie_word_embeddings"],
    )
    plain = Plain(
        decoder=decoder,
        norm=NormConfig(eps=values[architecture.norm_eps]),
        num_layers=values["num_hidden_layers"],
        heads=heads,
        hidden=MlpConfig(values["intermediate_size"], values["hidden_act"]) if "intermediate_size" in values else None,
    )
    return architecture.settings(title, values, plain)


def _heads(title: str, values: Values, words: Mapping[str, str]) -> AttentionConfig:
    """The plain attention. Raises ConfigError with everything that is wrong with its sizes."""
    heads = values["num_attention_heads"]
    kv_heads, given = values.get("num_key_value_heads") or heads, values.get("head_dim")
    size, size_key, heads_key = values["hidden_size"], *(words.get(w, w) for w in ("hidden_size", "num_attention_heads"))
    problems = []
    if heads % kv_heads:
        problems.append(f"{heads_key}={heads} is not a multiple of num_key_value_heads={kv_heads}")
    if not given and size % heads:
        problems.append(f"{size_key}={size} is not a multiple of {heads_key}={heads}, and head_dim is not given")
    if problems:
        raise ConfigError(refusal(title, problems))
    return AttentionConfig(heads, kv_heads, given or size // heads, norm=NormConfig(eps=values.get("rms_norm_eps", 1e-6)))
