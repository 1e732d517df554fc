"""The nodes that a rank graph has and a logical graph has not: collectives, and what depends on a rank's coordinate.

Each is a function of values without data: it gives the shape of its result. What it means is in `mpar/collectives.py`.
"""

from torch import Tensor

__all__ = ["COLLECTIVES", "all_gather", "all_reduce", "all_to_all", "reduce_scatter", "shard", "start"]


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
