"""The ops that only rank graphs have: collectives, and ops that depend on a rank's coordinate.

The functions here take tensors without data and give the shapes of the results. `mpar/collectives.py` says what the collectives
compute.

`shift` and `exchange_rows` only post their messages, and so do the others if they are called with `posted=True`; `arrived` waits
for them. Ops between the two run while the messages are on their way.
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
    "is_posted",
    "reduce_scatter",
    "shard",
    "shift",
    "start",
]


def all_gather(x: Tensor, *, axes: tuple[str, ...], dim: int, size: int, posted: bool = False) -> Tensor:
    """The shards of all `size` ranks of the group over `axes`, concatenated along `dim` in the group's order."""
    return x.new_empty([n * size if i == dim else n for i, n in enumerate(x.shape)])


def reduce_scatter(x: Tensor, *, axes: tuple[str, ...], dim: int, size: int, posted: bool = False) -> Tensor:
    """One of `size` equal parts along `dim` of the sum over the group."""
    return x.new_empty([n // size if i == dim else n for i, n in enumerate(x.shape)])


def all_reduce(x: Tensor, *, axes: tuple[str, ...], op: str, size: int, posted: bool = False) -> Tensor:
    """The sum (or "max") over the group, on all of its ranks."""
    return x.new_empty(x.shape)


def all_to_all(x: Tensor, *, axes: tuple[str, ...], src: int, dst: int, size: int, posted: bool = False) -> Tensor:
    """From sharded along `src` to sharded along `dst`."""
    return x.new_empty([n * size if i == src else n // size if i == dst else n for i, n in enumerate(x.shape)])


def shift(xs: Sequence[Tensor], *, axes: tuple[str, ...], size: int) -> tuple[Tensor, ...]:
    """The values of the previous rank along `axes`; the first rank gets those of the last. Only readable after `arrived`."""
    return tuple(x.new_empty(x.shape) for x in xs)


def exchange_rows(
    xs: Sequence[Tensor], sent: Tensor, received: Tensor, *, axes: tuple[str, ...], size: int, num_rows: int | None
) -> tuple[Tensor, ...]:
    """Send rows of `xs[0]` to all ranks of the group, `sent[i]` rows to rank i, and receive `received[i]` rows from rank i.

    Rows are sent in order and the result has them in the order of the ranks. How many rows arrive is known only at run time; the
    shape here says that as many arrive as are sent, as they do on average. With `num_rows` the result has this many rows, filled
    up with zeros. Only readable after `arrived`.
    """
    x = xs[0]
    return (x.new_empty(x.shape if num_rows is None else (num_rows, *x.shape[1:])),)


def arrived(posted: Sequence[Tensor], sent: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The results of a posted collective, once they have arrived. `sent` is what was posted: it must not change before this."""
    return tuple(posted)


def shard(x: Tensor, *, axes: tuple[str, ...], dim: int, size: int) -> Tensor:
    """This rank's shard of a value that all ranks of the group have. It is a view and needs no communication."""
    return x.narrow(dim, 0, x.shape[dim] // size)


def start(*, axes: tuple[str, ...], extent: int) -> int:
    """The global index of the first element that this rank holds of a factor with `extent` local elements."""
    return 0


POSTED = (shift, exchange_rows)
COLLECTIVES = (all_gather, reduce_scatter, all_reduce, all_to_all, *POSTED)


def is_posted(node: fx.Node) -> bool:
    """Whether a collective only posts its messages."""
    return node.target in POSTED or node.kwargs.get("posted", False)


def bytes_of(node: fx.Node) -> int:
    """The bytes that one rank contributes to a collective."""
    sent = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
    return sum(x.meta["val"].nbytes for x in sent)  # type: ignore[union-attr]
