"""The nodes that a rank graph has and a logical graph has not: collectives, and what depends on a rank's coordinate.

Each is a function of values without data (it gives the shape of its result) with a meaning in `combine`: what the results on
all ranks of a group are, given the operands on all of them. The runtime carries them out; the simulator calls `combine`.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["COLLECTIVES", "all_gather", "all_reduce", "all_to_all", "combine", "fold", "reduce_scatter", "shard", "start"]


def all_gather(x: Tensor, *, axes: tuple[str, ...], dim: int, size: int) -> Tensor:
    """The shards of all `size` ranks of the group over `axes`, concatenated along `dim` in the group's order."""
    return x.new_empty([n * size if i == dim else n for i, n in enumerate(x.shape)])


def reduce_scatter(x: Tensor, *, axes: tuple[str, ...], dim: int, size: int) -> Tensor:
    """One of `size` equal parts along `dim` of the sum over the group."""
    return x.new_empty([n // size if i == dim else n for i, n in enumerate(x.shape)])


def all_reduce(x: Tensor, *, axes: tuple[str, ...], op: str, size: int) -> Tensor:
    """The sum (or "max") over the group, on all of its ranks."""
    return x.new_empty(x.shape)


def all_to_all(x: Tensor, *, axes: tuple[str, ...], src: int, dst: int, size: int) -> Tensor:
    """From sharded along `src` to sharded along `dst`."""
    return x.new_empty([n * size if i == src else n // size if i == dst else n for i, n in enumerate(x.shape)])


def shard(x: Tensor, *, axes: tuple[str, ...], dim: int, size: int) -> Tensor:
    """This rank's part of a value that all ranks of the group have; a view, no communication."""
    return x.narrow(dim, 0, x.shape[dim] // size)


def start(*, axes: tuple[str, ...], extent: int) -> int:
    """The global index of the first element that this rank holds of a factor with `extent` local elements."""
    return 0


COLLECTIVES = (all_gather, reduce_scatter, all_reduce, all_to_all)


def fold(parts: Sequence[Tensor], op: str = "sum") -> Tensor:
    """Reduce in the order given, from the left: the one order of addition that runtime and simulator share."""
    return functools.reduce(torch.add if op == "sum" else torch.maximum, parts)


def combine(target: Any, parts: Sequence[Tensor], kwargs: dict[str, Any]) -> list[Tensor]:
    """What each rank of a group has after the collective `target`, given what each has before, in the group's order."""
    n = len(parts)
    if target is all_gather:
        return [torch.cat(list(parts), kwargs["dim"])] * n
    if target is reduce_scatter:
        chunks = [part.chunk(n, kwargs["dim"]) for part in parts]
        return [fold([chunk[rank] for chunk in chunks]).contiguous() for rank in range(n)]
    if target is all_reduce:
        return [fold(parts, kwargs["op"])] * n
    assert target is all_to_all, target
    chunks = [part.chunk(n, kwargs["dst"]) for part in parts]
    return [torch.cat([chunk[rank] for chunk in chunks], kwargs["src"]) for rank in range(n)]
