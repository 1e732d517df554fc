"""PlainValue: what a configuration is made of. It is not in `mpar.plain`, because that loads torch."""

from typing import TypeAlias

__all__ = ["PlainValue"]

PlainValue: TypeAlias = "bool | int | float | str | list[PlainValue] | dict[str, PlainValue] | None"
"""What JSON has; a field of it may hold any such value."""
