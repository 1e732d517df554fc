"""Keys: the fields of the configuration, with their text for `--help` and the bounds of their values."""

import math
import operator
from collections.abc import Callable
from dataclasses import MISSING, Field, field, fields
from typing import Any

__all__ = ["BOUNDS", "bounds_of", "key", "outside", "within_bounds"]

BOUNDS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "at_least": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "at_most": ("at most", operator.le),
    "below": ("below", operator.lt),
}
"""The bounds that a key may have: each in words, and whether a value keeps it."""


def key(doc: str, *, default: Any = MISSING, default_factory: Any = MISSING, prose: bool = False, **bounds: float) -> Any:
    """A field with its text for `--help`. A field with a default may be missing in configuration files.

    bounds: `at_least`, `above`, `at_most` and `below`, of a number or of each number in a list. prose: a text for people, in
    which the command line gives no character a meaning.
    """
    return field(metadata={"doc": doc, "prose": prose, **bounds}, default=default, default_factory=default_factory)


def bounds_of(described: Field) -> str:
    """The bounds of a field in words, such as `above 0, below 1`; an empty text if it has none."""
    return ", ".join(f"{words} {described.metadata[name]:g}" for name, (words, _) in BOUNDS.items() if name in described.metadata)


def outside(described: Field, value: object) -> str:
    """What `value`, or each of its items, must be, if it is not; an empty text if it keeps the bounds of the field."""
    items = value if isinstance(value, tuple) else value.values() if isinstance(value, dict) else (value,)
    numbers = [item for item in items if isinstance(item, (int, float))]
    if not all(math.isfinite(number) for number in numbers):
        return "a finite number"
    bounds = [(keeps, described.metadata[name]) for name, (_, keeps) in BOUNDS.items() if name in described.metadata]
    return "" if all(keeps(number, bound) for number in numbers for keeps, bound in bounds) else bounds_of(described)


def within_bounds(*groups: object) -> bool:
    """Whether all values in these groups of the configuration keep their bounds."""
    return not any(outside(item, getattr(group, item.name)) for group in groups for item in fields(group))  # type: ignore[arg-type]
