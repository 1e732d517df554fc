"""The values of a program, which are local tensors of one rank; and leaves, the values that callers know by a path."""

from dataclasses import dataclass

import torch

from mpar.spec import P

__all__ = ["Leaf", "Value"]


@dataclass(frozen=True)
class Value:
    """One local tensor of one rank; `shape` is local.

    storage: the number of the storage that it lives in; views share a storage.
    offset:  the element of the storage at which it begins.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: P
    storage: int
    offset: int = 0

    @property
    def bytes(self) -> int:
        """The size of its elements in bytes."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class Leaf:
    """One tensor that goes in or out of a program: a parameter, an optimizer's slot, an entry of the batch, a scalar, a metric.

    `shape` is global; `value` is the number of the value that holds each rank's shard.
    """

    path: str
    value: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: P
