"""Architecture: everything in which one Hugging Face model type differs from the others.

To add one, declare an `Architecture` in a module of its own, with a map of config keys, a map of weight names (see
`mpar/models/hf/_weight_map.py`) and `settings`, which composes layers of parts; and enter it in `_table.py`. Users can instead
pass an architecture of their own in a table to `models.from_config` and the like. Parity with transformers is tested for every
architecture that has variants in the table of tests/models/variants.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from mpar.models.architectures.keys import Key, Values, read_rope
from mpar.models.decoder import DecoderConfig, LayerConfig
from mpar.models.layers import MAIN, AttentionConfig, Mixer, Mlp, MlpConfig, NormConfig, Rope

__all__ = ["Architecture", "Plain", "Ropes", "no_rope", "one_rope", "windowed"]

Ropes = tuple[tuple[str, Rope], ...]


@dataclass(frozen=True)
class Plain:
    """The plain decoder that the common keys describe. The `settings` of an architecture start from it.

    decoder: everything but layers and norm.
    norm:    the norm of all layers and of the head.
    heads:   the result of `attention`; None for configs without num_attention_heads.
    hidden:  the result of `mlp`; None for configs without intermediate_size.
    """

    decoder: DecoderConfig
    norm: NormConfig
    num_layers: int
    heads: AttentionConfig | None
    hidden: MlpConfig | None

    @property
    def attention(self) -> AttentionConfig:
        """The plain attention, for architectures whose configs have num_attention_heads."""
        assert self.heads is not None, "keys of this architecture have no num_attention_heads"
        return self.heads

    @property
    def mlp(self) -> MlpConfig:
        """The plain feed-forward layer, for architectures whose configs have intermediate_size."""
        assert self.hidden is not None, "keys of this architecture have no intermediate_size"
        return self.hidden

    def stack(
        self,
        mixers: Mixer | Sequence[Mixer] | None = None,
        mlps: Mlp | Sequence[Mlp | None] | None = None,
        norms: Literal["pre", "post", "both"] = "pre",
    ) -> DecoderConfig:
        """The decoder with layers of these parts. `mixers` and `mlps` are one config for all layers, or a sequence with one for
        each; by default they are the plain attention and feed-forward layer."""
        mixers = self.attention if mixers is None else mixers
        mlps = self.mlp if mlps is None else mlps
        every_mixer = mixers if isinstance(mixers, Sequence) else (mixers,) * self.num_layers
        every_mlp = mlps if isinstance(mlps, Sequence) else (mlps,) * self.num_layers
        layers = [LayerConfig(mixer, mlp, self.norm, norms) for mixer, mlp in zip(every_mixer, every_mlp, strict=True)]
        return replace(self.decoder, layers=tuple(layers), norm=self.norm)


def windowed(attention: AttentionConfig, windows: Sequence[int | None]) -> tuple[AttentionConfig, ...]:
    """One attention for each of `windows`, all equal but for the window."""
    return tuple(replace(attention, window=window) for window in windows)


def one_rope(title: str, values: Values, head_size: int, ignore: Sequence[str], theta: float = 10_000.0) -> Ropes:
    """The one rotation that a config describes; `theta` is the default if the config does not give it."""
    return ((MAIN, read_rope(title, values, head_size, ignore, theta=theta)),)


def no_rope(title: str, values: Values, head_size: int, ignore: Sequence[str]) -> Ropes:
    """No rotation."""
    return ()


@dataclass(frozen=True)
class Architecture:
    """One model type. It is plain data and registers itself nowhere, so `dataclasses.replace` can make a private variant.

    hf_class: the class in transformers.
    keys:     the keys that a config may have.
    settings: `fn(title, values, plain)` gives the decoder, usually by `plain.stack`; `title` is for messages.
    names:    path of a leaf -> (name of the stored tensor, transform), as in `mpar/models/hf/_weight_map.py`.
    base:     the prefix of all names of the decoder; checkpoints of a decoder without head may lack it.
    ignored:  keys that configs have but that are not read, each with the reason.
    words:    common key -> the key that configs of this architecture have instead.
    ropes:    `fn(title, values, head_size, ignore)` gives the rotations, each with its name.
    norm_eps: the key of the norms' eps.
    absent:   names of tensors that checkpoints may hold but that are not needed.
    layers_behind: the key for the number of layers after the last one, for further tokens; None if the architecture has none.
    """

    name: str
    hf_class: str
    keys: Mapping[str, Key]
    settings: Callable[[str, Values, Plain], DecoderConfig]
    names: Mapping[str, tuple[str, str]]
    ignored: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)
    ropes: Callable[[str, Values, int, Sequence[str]], Ropes] = one_rope
    base: str = "model."
    norm_eps: str = "rms_norm_eps"
    absent: tuple[str, ...] = ("model.layers.{i}.self_attn.rotary_emb.inv_freq",)
    layers_behind: str | None = None
