"""Reading a Hugging Face config.json. Every key is either read, or listed as ignored with a reason, or an error."""

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpar.errors import ConfigError, brief

__all__ = ["NUMBER", "REQUIRED", "Key", "Values", "is_number", "read_config", "refusal"]


class Missing(enum.Enum):
    """The default of a key that must be given. An enum, so that it is the same object after pickling."""

    REQUIRED = "required"


REQUIRED = Missing.REQUIRED
NUMBER = (int, float)
_MOST_LISTED = 20  # unknown keys in a message
_LARGEST_SIZE = 2**22
"""The largest dim of a tensor, such as of a vocabulary. A config may come from a stranger, and no tensor can have any size."""
_LARGEST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "first_k_dense_replace"), 2**12),  # each layer is an object
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"), 2**12),  # each has names
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings", "n_positions", "n_ctx"), 2**31),
    "sliding_window": 2**31,
}
"""The largest integers of keys whose bound is another one."""
Values = Mapping[str, Any]
"""The values of a config by key. `read_config` has checked that each is one that its `Key` accepts."""


@dataclass(frozen=True)
class Key:
    """Which values a key may have.

    kind:     the types of its values. nullable: whether null is a value too. positive: whether numbers must be.
    default:  the value if the config does not have the key.
    accepted: if not empty, the only values that are implemented.
    """

    kind: tuple[type, ...]
    default: Any = REQUIRED
    nullable: bool = False
    positive: bool = False
    accepted: tuple[Any, ...] = field(default=())


def read_config(
    title: str, raw: Mapping[str, object], keys: Mapping[str, Key], ignore: Sequence[str], ignored: Mapping[str, str]
) -> Values:
    """The values of `keys`, with defaults for those that `raw` lacks.

    Other keys are unknown unless `ignored`, a table with reasons, or the user's `ignore` has them. For keys in `ignore`, values
    that are not implemented are accepted too. Raises ConfigError with every unknown key and unusable value of `raw`.
    """
    problems = []
    unknown = sorted(key for key in raw if key not in keys and key not in ignored and key not in ignore)
    if unknown:
        further = f" and {len(unknown) - _MOST_LISTED} more" if len(unknown) > _MOST_LISTED else ""
        listed = ", ".join(f"{key[:80]}={brief(raw[key])}" for key in unknown[:_MOST_LISTED])
        problems.append(f"unknown keys: {listed}{further}")
    values: dict[str, Any] = {}
    for name, key in keys.items():
        value = raw.get(name, key.default)
        values[name] = value
        if value is REQUIRED:
            problems.append(f"{name} is missing")
        elif isinstance(value, int) and key.kind == (int,) and value > _LARGEST.get(name, _LARGEST_SIZE):
            problems.append(f"{name}={value}: must be at most {_LARGEST.get(name, _LARGEST_SIZE)}")
        elif name in raw and not _has_kind(value, key):
            problems.append(f"{name}={brief(value)}: must be {_kinds(key)}")
        elif key.accepted and value not in key.accepted and name not in ignore:
            accepted = ", ".join(repr(item) for item in key.accepted if item is not None)
            problems.append(f"{name}={brief(value)}: only {accepted} {'is' if ',' not in accepted else 'are'} implemented")
    if problems:
        raise ConfigError(refusal(title, problems, unknown))
    return values


def _has_kind(value: Any, key: Key) -> bool:
    if value is None:
        return key.nullable
    if isinstance(value, bool) and bool not in key.kind:
        return False
    if isinstance(value, float) and not math.isfinite(value):
        return False
    right_type = isinstance(value, key.kind)
    return right_type and not (key.positive and value <= 0)


def is_number(value: object) -> bool:
    """Whether `value` is a finite number."""
    return isinstance(value, NUMBER) and not isinstance(value, bool) and math.isfinite(value)


def _kinds(key: Key) -> str:
    kinds = " or ".join(kind.__name__ for kind in key.kind)
    return f"{'a positive ' if key.positive else ''}{kinds}{' or null' if key.nullable else ''}"


def refusal(title: str, problems: Sequence[str], unknown: Sequence[str] = ()) -> str:
    """The message of an error with all `problems`, and what to do about `unknown` keys."""
    lines = "\n".join(f"  {problem}" for problem in problems)
    names = ", ".join(repr(key[:80]) for key in unknown[:_MOST_LISTED])
    way_out = f"\nIf the unknown keys do not change what the model computes, pass ignore=({names},)." if unknown else ""
    return f"cannot read {title}:\n{lines}{way_out}"
