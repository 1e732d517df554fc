"""Sizes: the shape of a parameter, as a leaf in a tree of shapes."""

from typing import TypeGuard

__all__ = ["Sizes", "is_sizes"]

Sizes = tuple[int, ...]


def is_sizes(x: object) -> TypeGuard[Sizes]:
    """Whether `x` is a leaf of a tree of shapes."""
    return isinstance(x, tuple) and all(isinstance(size, int) for size in x)
