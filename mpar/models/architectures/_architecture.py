"""Architecture: what tells one Hugging Face model type from another; the table of those that are known.

To add one, declare an `Architecture` in a module of its own: a map of config keys, a map of weight names (see `hf/_weight_map.py`),
and `settings`, which puts layers together from parts. Its parity with transformers is tested once it has variants in the table
of tests/models/variants.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mpar.errors import ConfigError, UnknownNameError
from mpar.models.architectures.keys._keys import IGNORED_KEYS, Key, read_config
from mpar.models.architectures.keys._rope import read_rope
from mpar.models.decoder._decoder import DecoderConfig, LayerConfig
from mpar.models.decoder._multi_token import MultiTokenConfig
from mpar.models.layers._attention import AttentionConfig
from mpar.models.layers._feed_forward import MlpConfig
from mpar.models.layers._norm import NormConfig
from mpar.models.layers._rope import MAIN, Rope
from mpar.models.layers.moe._moe import MoeConfig, with_router_options

__all__ = ["ARCHITECTURES", "Architecture", "Plain", "Ropes", "architecture", "decoder_config", "no_rope", "one_rope", "windowed"]

ARCHITECTURES: dict[str, "Architecture"] = {}
Ropes = tuple[tuple[str, Rope], ...]


@dataclass(frozen=True)
class Plain:
    """The parts of the plain decoder, as far as the common keys tell: what an architecture's settings start from.

    `attention` and `mlp` are None for an architecture without the keys that they need.
    """

    attention: AttentionConfig
    mlp: MlpConfig
    norm: NormConfig
    num_layers: int

    def change(
        self,
        attention: Mapping[str, Any] | None = None,
        mlp: Mapping[str, Any] | None = None,
        norm: Mapping[str, Any] | None = None,
    ) -> "Plain":
        """The same with other fields of its parts."""
        return replace(
            self,
            attention=replace(self.attention, **attention) if attention else self.attention,
            mlp=replace(self.mlp, **mlp) if mlp else self.mlp,
            norm=replace(self.norm, **norm) if norm else self.norm,
        )

    def stack(self, mixers: Sequence[Any] | None = None, mlps: Sequence[Any] | None = None, norms: str = "pre") -> dict[str, Any]:
        """The fields `layers` and `norm` of DecoderConfig: one config of a mixer and an mlp per layer, by default those here."""
        mixers, mlps = mixers or (self.attention,) * self.num_layers, mlps or (self.mlp,) * self.num_layers
        pairs = zip(mixers, mlps, strict=True)
        return {"layers": tuple(LayerConfig(mixer, mlp, self.norm, norms) for mixer, mlp in pairs), "norm": self.norm}  # type: ignore[arg-type]


def windowed(attention: AttentionConfig, windows: Sequence[int | None]) -> tuple[AttentionConfig, ...]:
    """One attention per layer, the same but for its window."""
    return tuple(replace(attention, window=window) for window in windows)


def one_rope(title: str, values: Mapping[str, Any], head_size: int, ignore: Sequence[str]) -> Ropes:
    """The one rotation that a config describes."""
    return ((MAIN, read_rope(title, values, head_size, ignore)),)


def no_rope(title: str, values: Mapping[str, Any], head_size: int, ignore: Sequence[str]) -> Ropes:
    """No rotation."""
    return ()


@dataclass(frozen=True)
class Architecture:
    """One model type.

    hf_class: the class in transformers.        keys: what its config may hold.
    settings: `fn(title, values, plain) -> dict` gives layers, norm and what else of DecoderConfig is not the plain decoder's;
              it starts from `plain.stack()`.
    names:    path of a leaf -> (name of the stored tensor, transform), as in `hf/_weight_map.py`.
    base:     what the names of the decoder begin with; checkpoints of the decoder without head may lack it.
    ignored:  keys that its configs have and that are not read, with the reason.
    words:    common key -> the key by which its configs call it.
    ropes:    `fn(title, values, head_size, ignore)` gives the rotations by name.
    norm_eps: the key of the norms' eps.
    absent:   names that old or tied checkpoints may hold and that carry nothing.
    layers_behind: the key by which its configs count the layers behind the last one, for further tokens; None: it has none.
    """

    name: str
    hf_class: str
    keys: Mapping[str, Key]
    settings: Callable[[str, Mapping[str, Any], Plain], dict[str, Any]]
    names: Mapping[str, tuple[str, str]]
    ignored: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)
    ropes: Callable[[str, Mapping[str, Any], int, Sequence[str]], Ropes] = one_rope
    base: str = "model."
    norm_eps: str = "rms_norm_eps"
    absent: tuple[str, ...] = ("model.layers.{i}.self_attn.rotary_emb.inv_freq",)
    layers_behind: str | None = None

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


def decoder_config(
    raw: Mapping[str, Any],
    ignore: Sequence[str],
    vocab_multiple: int,
    logits_chunk: int | None,
    router: Mapping[str, Any] | None = None,
    mtp_loss_weight: float | None = None,
) -> DecoderConfig:
    """The mathematics that a Hugging Face config describes; `router` has options of `with_router_options` for all its routers.
    With `mtp_loss_weight` one more layer, like the last, learns the token after the next, its loss times this.

    Raises ConfigError with everything that is wrong with it.
    """
    found = architecture(raw)
    title = f"the config of a {found.name}"
    values = read_config(title, raw, found.keys, ignore, {**IGNORED_KEYS, **found.ignored})
    values |= {word: values[own] for word, own in found.words.items()}
    heads, head_size = None, 0
    problems: list[str] = []
    if "num_attention_heads" in values:
        heads, head_size, problems = _heads(values, found.words)
    for name, value in (("vocab_multiple", vocab_multiple), ("logits_chunk", logits_chunk)):
        if value is not None and value < 1:
            problems.append(f"{name}={value}: must be a positive int")
    if problems:
        raise ConfigError(f"cannot read {title}:\n" + "\n".join(f"  {problem}" for problem in problems))
    has_mlp = "intermediate_size" in values
    plain = Plain(
        attention=heads,  # type: ignore[arg-type]
        mlp=MlpConfig(values["intermediate_size"], values["hidden_act"]) if has_mlp else None,  # type: ignore[arg-type]
        norm=NormConfig(eps=values[found.norm_eps]),
        num_layers=values["num_hidden_layers"],
    )
    common = {
        "vocab_size": values["vocab_size"],
        "hidden_size": values["hidden_size"],
        "ropes": found.ropes(title, values, head_size, ignore),
        "initializer_range": values["initializer_range"],
        "tied": values["tie_word_embeddings"],
        "vocab_multiple": vocab_multiple,
        "logits_chunk": logits_chunk,
    }
    config = DecoderConfig(**(common | found.settings(title, values, plain)))
    config = _routed(title, config, router) if router else config
    if mtp_loss_weight is None:
        return config
    if found.layers_behind is None:
        able = ", ".join(sorted(name for name, other in ARCHITECTURES.items() if other.layers_behind is not None))
        raise ConfigError(
            f"cannot read {title}: mtp_loss_weight={mtp_loss_weight} asks for a layer for further tokens, which {found.name} "
            f"models do not have ({able} ones do). Leave mtp_loss_weight out (null)."
        )
    return replace(config, multi_token=MultiTokenConfig(config.layers[-1], mtp_loss_weight))


def _routed(title: str, config: DecoderConfig, router: Mapping[str, Any]) -> DecoderConfig:
    """`config` with the options `router` in every layer of experts."""
    if not any(isinstance(layer.mlp, MoeConfig) for layer in config.layers):
        raise ConfigError(f"cannot read {title}: router={dict(router)} is for layers of experts, and this model has none")
    layers = [
        replace(layer, mlp=with_router_options(layer.mlp, router)) if isinstance(layer.mlp, MoeConfig) else layer
        for layer in config.layers
    ]
    return replace(config, layers=tuple(layers))


def _heads(values: Mapping[str, Any], words: Mapping[str, str]) -> tuple[AttentionConfig, int, list[str]]:
    """The plain attention, its head size, and what is wrong with the sizes."""
    heads = values["num_attention_heads"]
    kv_heads, given = values.get("num_key_value_heads") or heads, values.get("head_dim")
    size, size_key, heads_key = values["hidden_size"], *(words.get(w, w) for w in ("hidden_size", "num_attention_heads"))
    problems = []
    if heads % kv_heads:
        problems.append(f"{heads_key}={heads} is not a multiple of num_key_value_heads={kv_heads}")
    if not given and size % heads:
        problems.append(f"{size_key}={size} is not a multiple of {heads_key}={heads}, and head_dim is not given")
    head_size = given or size // heads
    return AttentionConfig(heads, kv_heads, head_size, norm=NormConfig(eps=values.get("rms_norm_eps", 1e-6))), head_size, problems
