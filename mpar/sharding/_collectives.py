"""The nodes that a rank graph has and a logical graph has not: collectives, and what depends on a rank's coordinate.

Each is a function of values without data: it gives the shape of its result. What it means is in `mpar/collectives.py`.

`shift` and `exchange_rows` only post their messages; `arrived` waits for them. What lies between overlaps with them.
"""

from collections.abc import Sequence

from torch import Tensor, fx

__all__ = [
    "COLLECTIVES",
    "POSTED",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "arrived",
    "bytes_of",
    "exchange_rows",
    "reduce_scatter",
    "shard",
    "shift",
    "start",
]


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


def shift(xs: Sequence[Tensor], *, axes: tuple[str, ...], size: int) -> tuple[Tensor, ...]:
    """What the rank before this one along `axes` has; the first has that of the last. In flight until `arrived`."""
    return tuple(x.new_empty(x.shape) for x in xs)


def exchange_rows(
    xs: Sequence[Tensor], sent: Tensor, received: Tensor, *, axes: tuple[str, ...], size: int, num_rows: int | None
) -> tuple[Tensor, ...]:
    """Rows of `xs[0]` to every rank, in their order, `sent` (size,) of them; and those that came, `received` (size,) of each.

    Numbers are known at run time; here as many come as are sent, which holds on average. With `num_rows` the result has this many
    rows, zeros at the end. In flight until `arrived`.
    """
    x = xs[0]
    return (x.new_empty(x.shape if num_rows is None else (num_rows, *x.shape[1:])),)


def arrived(posted: Sequence[Tensor], sent: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What was in flight, now there; `sent` is what was posted, which had to stay as it was."""
    return tuple(posted)


def shard(x: Tensor, *, axes: tuple[str, ...], dim: int, size: int) -> Tensor:
    """This rank's part of a value that all ranks of the group have; a view, no communication."""
    return x.narrow(dim, 0, x.shape[dim] // size)


def start(*, axes: tuple[str, ...], extent: int) -> int:
    """The global index of the first element that this rank holds of a factor with `extent` local elements."""
    return 0


POSTED = (shift, exchange_rows)
COLLECTIVES = (all_gather, reduce_scatter, all_reduce, all_to_all, *POSTED)


def bytes_of(node: fx.Node) -> int:
    """What one rank contributes to a collective."""
    sent = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
    return sum(x.meta["val"].nbytes for x in sent)  # type: ignore[union-attr]
