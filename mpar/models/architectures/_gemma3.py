"""The text model of Gemma 3 (arXiv:2503.19786): Gemma 2 with two rotations, and norms of query and key heads instead of caps.

Layers with a window have a second rotation with a smaller theta ("local"); every sixth layer has no window.
"""

from collections.abc import Sequence
from dataclasses import replace

from mpar.errors import ConfigError
from mpar.models.architectures._architecture import Architecture, Plain, Ropes, windowed
from mpar.models.architectures._gemma2 import GEMMA2_NAMES, GEMMA_IGNORED, GEMMA_KEYS, gemma_plain
from mpar.models.architectures.keys import Key, Values, read_rope, refusal, windows_of
from mpar.models.decoder import DecoderConfig
from mpar.models.layers import MAIN

__all__ = ["GEMMA3"]

LOCAL = "local"
_KINDS = {"full_attention": (MAIN, "rope_theta", 1_000_000.0), "sliding_attention": (LOCAL, "rope_local_base_freq", 10_000.0)}
GEMMA3_NAMES = {
    **GEMMA2_NAMES,
    "layers.{i}.attention.q_norm_H": ("model.layers.{i}.self_attn.q_norm.weight", "h -> h"),
    "layers.{i}.attention.k_norm_H": ("model.layers.{i}.self_attn.k_norm.weight", "h -> h"),
}


def _ropes(title: str, values: Values, head_size: int, ignore: Sequence[str]) -> Ropes:
    """Both rotations, from rope_parameters by layer type, or from rope_theta with rope_scaling and rope_local_base_freq."""
    nested = values["rope_parameters"] or {}
    strange = sorted(set(nested) - set(_KINDS))
    if strange:
        listed = ", ".join(f"rope_parameters.{key}={nested[key]!r}" for key in strange)
        raise ConfigError(refusal(title, [f"{listed}: there are {' and '.join(_KINDS)}, a rotation for each"]))
    ropes = []
    for kind, (name, theta_key, theta) in _KINDS.items():
        rope_values = {
            **values,
            "rope_parameters": nested.get(kind),
            "rope_scaling": values["rope_scaling"] if name == MAIN else None,
            "rope_theta": values[theta_key],
        }
        ropes.append((name, read_rope(title, rope_values, head_size, ignore, theta=theta)))
    return tuple(ropes)


def _settings(title: str, values: Values, plain: Plain) -> DecoderConfig:
    plain = gemma_plain(values, plain)
    attention = replace(plain.attention, qk_norm="head", norm=plain.norm)
    kinds, pattern = values["layer_types"], values["sliding_window_pattern"]
    if kinds is None:
        kinds = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(plain.num_layers)]
    mixers = windowed(attention, windows_of(title, values, kinds))
    mixers = tuple(replace(mixer, rope=_KINDS[kind][0]) for mixer, kind in zip(mixers, kinds, strict=True))
    return plain.stack(mixers, norms="both")


GEMMA3 = Architecture(
    name="gemma3_text",
    hf_class="Gemma3ForCausalLM",
    keys={
        **GEMMA_KEYS,
        "attn_logit_softcapping": Key((int, float), None, nullable=True, accepted=(None,)),  # transformers does not apply it
        "rope_local_base_freq": Key((int, float), None, nullable=True, positive=True),
        "sliding_window_pattern": Key((int,), 6, positive=True),
    },
    settings=_settings,
    names=GEMMA3_NAMES,
    words={"hidden_act": "hidden_activation"},
    ropes=_ropes,
    ignored={**GEMMA_IGNORED, "_sliding_window_pattern": "transformers writes layer_types beside it, and reads them"},
)
