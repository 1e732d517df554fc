"""The values of a program: local tensors of one rank, and those of them that the outside knows by a path."""

from dataclasses import dataclass

import torch

from mpar.spec import P

__all__ = ["Leaf", "Value"]


@dataclass(frozen=True)
class Value:
    """One local tensor of one rank: `shape` is local. `storage` says which bytes it lives in (views share one),
    `offset` at which element it begins there."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: P
    storage: int
    offset: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of its elements."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class Leaf:
    """One tensor at the program's boundary: a parameter, a slot of the optimizer, a batch entry or a metric.

    `shape` is global; `value` is the number of the value that each rank holds of it.
    """

    path: str
    value: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: P
