"""Mamba-2 (Dao and Gu 2024, arXiv:2405.21060): layers of the mixer alone, with RMS norms before them and at the end."""

import math

from mpar.errors import ConfigError
from mpar.models.architectures._architecture import Architecture, Plain, no_rope
from mpar.models.architectures.keys import COMMON_KEYS, NUMBER, Key, Values
from mpar.models.decoder import DecoderConfig
from mpar.models.layers import MambaConfig

__all__ = ["MAMBA2"]

COMMON = ("is_encoder_decoder", "add_cross_attention", "is_decoder", "pruned_heads", "tie_word_embeddings")

_LAYER = "backbone.layers.{i}"
_IN, _CONV = f"{_LAYER}.mixer.in_proj", f"{_LAYER}.mixer.conv1d"
_NAMES = {
    "embed.table_VD": ("backbone.embeddings.weight", "v d -> v d"),
    "layers.{i}.attn_norm_D": (f"{_LAYER}.norm.weight", "d -> d"),
    "layers.{i}.mamba.z_DNH": (f"{_IN}.weight", "+(n h) d -> d n h"),
    "layers.{i}.mamba.x_DNH": (f"{_IN}.weight", "+(n h) d -> d n h"),
    "layers.{i}.mamba.b_DGK": (f"{_IN}.weight", "+(g k) d -> d g k"),
    "layers.{i}.mamba.c_DGK": (f"{_IN}.weight", "+(g k) d -> d g k"),
    "layers.{i}.mamba.dt_DN": (f"{_IN}.weight", "+n d -> d n"),
    "layers.{i}.mamba.z_bias_NH": (f"{_IN}.bias", "+(n h) -> n h"),
    "layers.{i}.mamba.x_bias_NH": (f"{_IN}.bias", "+(n h) -> n h"),
    "layers.{i}.mamba.b_bias_GK": (f"{_IN}.bias", "+(g k) -> g k"),
    "layers.{i}.mamba.c_bias_GK": (f"{_IN}.bias", "+(g k) -> g k"),
    "layers.{i}.mamba.dt_in_bias_N": (f"{_IN}.bias", "+n -> n"),
    "layers.{i}.mamba.conv_x_NHW": (f"{_CONV}.weight", "+(n h) 1 w -> n h w"),
    "layers.{i}.mamba.conv_b_GKW": (f"{_CONV}.weight", "+(g k) 1 w -> g k w"),
    "layers.{i}.mamba.conv_c_GKW": (f"{_CONV}.weight", "+(g k) 1 w -> g k w"),
    "layers.{i}.mamba.conv_x_bias_NH": (f"{_CONV}.bias", "+(n h) -> n h"),
    "layers.{i}.mamba.conv_b_bias_GK": (f"{_CONV}.bias", "+(g k) -> g k"),
    "layers.{i}.mamba.conv_c_bias_GK": (f"{_CONV}.bias", "+(g k) -> g k"),
    "layers.{i}.mamba.dt_bias_N": (f"{_LAYER}.mixer.dt_bias", "n -> n"),
    "layers.{i}.mamba.a_log_N": (f"{_LAYER}.mixer.A_log", "n -> n"),
    "layers.{i}.mamba.skip_N": (f"{_LAYER}.mixer.D", "n -> n"),
    "layers.{i}.mamba.norm_C": (f"{_LAYER}.mixer.norm.weight", "c -> c"),
    "layers.{i}.mamba.out_NHD": (f"{_LAYER}.mixer.out_proj.weight", "d (n h) -> n h d"),
    "layers.{i}.mamba.out_bias_D": (f"{_LAYER}.mixer.out_proj.bias", "d -> d"),
    "head.norm_D": ("backbone.norm_f.weight", "d -> d"),
    "head.head_DV": ("lm_head.weight", "v d -> d v"),
}


def _limits(value: object) -> tuple[float | None, float | None]:
    """The limits of time steps. A lower limit that is not positive has no effect, because time steps are positive."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ConfigError(f"time_step_limit={value!r}: must be two numbers")
    bounds = [float(part["__float__"]) if isinstance(part, dict) and list(part) == ["__float__"] else part for part in value]
    if any(isinstance(bound, bool) or not isinstance(bound, NUMBER) or math.isnan(bound) for bound in bounds):
        raise ConfigError(f"time_step_limit={value!r}: must be two numbers")
    return bounds[0] if bounds[0] > 0 else None, bounds[1] if math.isfinite(bounds[1]) else None


def _settings(title: str, values: Values, plain: Plain) -> DecoderConfig:
    problems = []
    inner, heads, head_size = values["expand"] * values["hidden_size"], values["num_heads"], values["head_dim"]
    if inner != heads * head_size:
        problems.append(f"expand * hidden_size is {inner}, num_heads * head_dim is {heads * head_size}; they must be the same")
    if heads % values["n_groups"]:
        problems.append(f"num_heads={heads} is not a multiple of n_groups={values['n_groups']}")
    try:
        limits = _limits(values["time_step_limit"])
    except (ConfigError, ValueError) as error:
        problems.append(str(error))
    if problems:
        raise ConfigError(f"cannot read {title}:\n" + "\n".join(f"  {problem}" for problem in problems))
    mixer = MambaConfig(
        num_heads=heads,
        head_size=head_size,
        num_groups=values["n_groups"],
        state_size=values["state_size"],
        conv_width=values["conv_kernel"],
        chunk=values["chunk_size"],
        dt_limits=limits,
        dt_range=(values["time_step_min"], values["time_step_max"]),
        dt_floor=values["time_step_floor"],
        bias=values["use_bias"],
        conv_bias=values["use_conv_bias"],
        norm_eps=values["layer_norm_epsilon"],
        out_scale=values["num_hidden_layers"] ** -0.5 if values["rescale_prenorm_residual"] else 1.0,
    )
    return plain.stack(mixer, [None] * plain.num_layers)


MAMBA2 = Architecture(
    name="mamba2",
    hf_class="Mamba2ForCausalLM",
    keys={
        **{name: COMMON_KEYS[name] for name in COMMON},
        "vocab_size": Key((int,), 32768, positive=True),
        "hidden_size": Key((int,), 4096, positive=True),
        "num_hidden_layers": Key((int,), 64, positive=True),
        "initializer_range": Key(NUMBER, 0.1),
        "layer_norm_epsilon": Key(NUMBER, 1e-5, positive=True),
        "num_heads": Key((int,), 128, positive=True),
        "head_dim": Key((int,), 64, positive=True),
        "state_size": Key((int,), 128, positive=True),
        "expand": Key((int,), 2, positive=True),
        "conv_kernel": Key((int,), 4, positive=True),
        "n_groups": Key((int,), 8, positive=True),
        "use_bias": Key((bool,), False),
        "use_conv_bias": Key((bool,), True),
        "hidden_act": Key((str,), "silu", accepted=("silu", "swish")),
        "chunk_size": Key((int,), 256, positive=True),
        "time_step_limit": Key((list, tuple), (0.0, math.inf)),
        "time_step_min": Key(NUMBER, 0.001, positive=True),
        "time_step_max": Key(NUMBER, 0.1, positive=True),
        "time_step_floor": Key(NUMBER, 1e-4, positive=True),
        "rescale_prenorm_residual": Key((bool,), False),
        "residual_in_fp32": Key((bool,), True),  # not used: the precision decides the dtype of the residual stream
        "time_step_rank": Key((int, str), "auto"),  # only Mamba-1 used it: its time steps came from two matrices
    },
    settings=_settings,
    names=_NAMES,
    base="backbone.",
    ropes=no_rope,
    norm_eps="layer_norm_epsilon",
    absent=(),
)
