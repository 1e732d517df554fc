"""Reading the rotation of a Hugging Face config: rope_parameters as of transformers 5, or the older rope_scaling."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mpar.errors import ConfigError
from mpar.models.architectures.keys._key import Values, is_number, refusal
from mpar.models.layers import DynamicRope, LinearRope, Llama3Rope, LongRope, Rope, YarnRope

__all__ = ["read_rope"]

_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
        "mscale", "mscale_all_dim", "truncate",
    ),
    "longrope": ("factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}  # fmt: skip
_NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_LISTS = ("short_factor", "long_factor")


def read_rope(
    title: str,
    values: Values,
    head_size: int,
    ignore: Sequence[str],
    *,
    theta: float = 10_000.0,
    partial: bool = False,
    aliases: Mapping[str, str] | None = None,
) -> Rope:
    """The rotation that rope_parameters (transformers 5) or rope_theta and rope_scaling (before) describe.

    theta:   the default if the config does not give one.
    aliases: other names of RoPE types.
    partial: whether partial_rotary_factor, the share of a head's features that have RoPE, may be below one.
    Raises ConfigError if the two layouts disagree, and for anything in them that is not implemented.
    """
    theta, given = _one_layout(title, values, theta)
    kind = given.get("rope_type", given.get("type", "default"))
    kind = (aliases or {}).get(kind, kind) if isinstance(kind, str) else kind
    if kind not in _KEYS:
        raise ConfigError(f"cannot read {title}: RoPE type {kind!r} is not implemented; known types: {', '.join(_KEYS)}")
    allowed = (*_KEYS[kind], "rope_type", "type", "rope_theta", "partial_rotary_factor")
    unknown = sorted(key for key in given if key not in allowed and f"rope_parameters.{key}" not in ignore)
    share = given.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0
    problems = _problems(kind, given, unknown, share, partial)
    size = int(head_size * share) if is_number(share) else head_size
    if size % 2:
        problems.append(f"head_dim={size} is odd; RoPE turns pairs")
    if not problems and kind == "dynamic" and size <= 2:
        problems.append("RoPE type 'dynamic' needs head_dim > 2")
    for key in _LISTS if kind == "longrope" and not problems else ():
        if len(given[key]) != size // 2:
            problems.append(f"rope_parameters.{key} has {len(given[key])} entries, but there are {size // 2} pairs")
    if problems:
        raise ConfigError(refusal(title, problems, [f"rope_parameters.{key}" for key in unknown]))
    return _make_rope(kind, given, theta, size, values)


def _problems(kind: str, given: Mapping[str, Any], unknown: Sequence[str], share: Any, partial: bool) -> list[str]:
    problems = []
    if unknown:
        listed = ", ".join(f"rope_parameters.{key}={given[key]!r}" for key in unknown)
        problems.append(f"unknown keys for RoPE type {kind!r}: {listed}")
    problems += [f"rope_parameters.{key} is missing" for key in _NEEDED.get(kind, ()) if given.get(key) is None]
    for key, value in given.items():
        if key not in _KEYS[kind] or key == "truncate" or value is None:
            continue
        if key in _LISTS:
            if not isinstance(value, list) or not all(is_number(item) and item > 0 for item in value):
                problems.append(f"rope_parameters.{key}={value!r}: must be a list of positive numbers")
        elif not is_number(value) or value <= 0:
            problems.append(f"rope_parameters.{key}={value!r}: must be a positive number")
    if not is_number(share) or not 0 < share <= 1 or (share != 1 and not partial):
        expected = "must be a number in (0, 1]" if partial else "only 1.0 is implemented"
        problems.append(f"rope_parameters.partial_rotary_factor={share!r}: {expected}")
    return problems


def _one_layout(title: str, values: Values, default_theta: float) -> tuple[float, dict[str, Any]]:
    """`(theta, all other settings)`, from whichever of both layouts the config has."""
    old, new = values["rope_scaling"], values["rope_parameters"]
    if old and new:
        disagree = {key: (old[key], new[key]) for key in old if key in new and old[key] != new[key]}
        if disagree:
            raise ConfigError(
                f"cannot read {title}: rope_scaling and rope_parameters disagree: {disagree}.\nRemove one of the two layouts."
            )
    given = {**(old or {}), **(new or {})}
    inner, outer = given.get("rope_theta"), values["rope_theta"]
    if inner is not None and outer is not None and inner != outer:
        raise ConfigError(
            f"cannot read {title}: rope_theta={outer} and rope_parameters.rope_theta={inner} disagree.\nRemove one."
        )
    theta = inner if inner is not None else outer if outer is not None else default_theta
    if not is_number(theta) or theta <= 0:
        raise ConfigError(f"cannot read {title}: rope_theta={theta!r}: must be a positive number")
    return float(theta), given


def _make_rope(kind: str, given: Mapping[str, Any], theta: float, size: int, values: Values) -> Rope:
    max_positions = values["max_position_embeddings"]
    original = values["original_max_position_embeddings"] or given.get("original_max_position_embeddings") or max_positions
    if kind == "linear":
        return LinearRope(theta, size, float(given["factor"]))
    if kind == "dynamic":
        return DynamicRope(theta, size, float(given["factor"]), max_positions)
    if kind == "llama3":
        return Llama3Rope(theta, size, given["factor"], given["low_freq_factor"], given["high_freq_factor"], original)
    if kind == "longrope":
        factor = given.get("factor") or max_positions / original
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        short, long = (tuple(float(item) for item in given[key]) for key in _LISTS)
        return LongRope(theta, size, short, long, original, given.get("attention_factor") or attention_factor)
    if kind == "yarn":
        factor = given.get("factor") or max_positions / original
        fast, slow = given.get("beta_fast") or 32.0, given.get("beta_slow") or 1.0
        truncate = given.get("truncate", True)
        return YarnRope(theta, size, float(factor), original, _yarn_attention_factor(given, factor), fast, slow, bool(truncate))
    return Rope(theta, size)


def _yarn_attention_factor(given: Mapping[str, Any], factor: float) -> float:
    """The given attention_factor; else 0.1 m ln(factor) + 1 with m = 1 (arXiv:2309.00071, eq. 22), or, if both mscale and
    mscale_all_dim are given, the quotient of this for the one and for the other."""

    def grown(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    if given.get("mscale") and given.get("mscale_all_dim"):
        return grown(given["mscale"]) / grown(given["mscale_all_dim"])
    return grown(1.0)
