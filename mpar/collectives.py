"""The meaning of every collective, on lists: from the tensors of all ranks of a group to their results. No process, no mesh."""

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias, cast, overload

import torch
from torch import Tensor

__all__ = ["combine", "fold"]


def fold(parts: Sequence[Tensor], op: str = "sum") -> Tensor:
    """The sum, or the maximum, of `parts` from left to right: the order of addition that runtime and simulation share."""
    return functools.reduce(torch.add if op == "sum" else torch.maximum, parts)


Operands: TypeAlias = tuple[Sequence[Tensor], *tuple[Tensor, ...]]
"""All operands of a rank: the tensors that travel, then those that say how, such as numbers of rows."""


@overload
def combine(kind: str, parts: Sequence[Tensor], **how: int | str | None) -> list[Tensor]: ...
@overload
def combine(kind: str, parts: Sequence[Operands], **how: int | str | None) -> list[tuple[Tensor, ...]]: ...
def combine(
    kind: str, parts: Sequence[Tensor] | Sequence[Operands], **how: int | str | None
) -> list[Tensor] | list[tuple[Tensor, ...]]:
    """The results of the collective `kind` on the ranks of a group, given their parts in the same order; new contiguous tensors.

    all_gather(dim), reduce_scatter(dim), all_reduce(op), all_to_all(src, dst): a part and a result are a tensor. The collectives
    that are posted, shift and exchange_rows(num_rows): a part has all operands of a rank, and a result is a tuple.
    """
    if kind in POSTED:
        return POSTED[kind](cast(Sequence[Operands], parts), **how)
    return TOGETHER[kind](cast(Sequence[Tensor], parts), **how)


def _all_gather(parts: Sequence[Tensor], *, dim: int) -> list[Tensor]:
    return [torch.cat(list(parts), dim) for _ in parts]


def _reduce_scatter(parts: Sequence[Tensor], *, dim: int) -> list[Tensor]:
    chunks = [part.chunk(len(parts), dim) for part in parts]
    return [fold([chunk[rank] for chunk in chunks]).contiguous() for rank in range(len(parts))]


def _all_reduce(parts: Sequence[Tensor], *, op: str) -> list[Tensor]:
    total = fold(parts, op)
    return [total.clone(memory_format=torch.contiguous_format) for _ in parts]


def _all_to_all(parts: Sequence[Tensor], *, src: int, dst: int) -> list[Tensor]:
    chunks = [part.chunk(len(parts), dst) for part in parts]
    return [torch.cat([chunk[rank] for chunk in chunks], src) for rank in range(len(parts))]


def _shift(parts: Sequence[Operands]) -> list[tuple[Tensor, ...]]:
    return [tuple(x.clone() for x in parts[rank - 1][0]) for rank in range(len(parts))]


def _exchange_rows(parts: Sequence[Operands], *, num_rows: int | None) -> list[tuple[Tensor, ...]]:
    """A part is a tensor of rows, the number of rows that go to each rank, and the number that comes from each."""
    cut = [x[: int(counts[0].sum())].split(counts[0].tolist()) for (x,), *counts in parts]
    out: list[tuple[Tensor, ...]] = []
    for rank, ((x,), *counts) in enumerate(parts):
        rows = [pieces[rank] for pieces in cut]
        assert [len(piece) for piece in rows] == counts[1].tolist(), "ranks disagree about the rows that they exchange"
        total = sum(len(piece) for piece in rows)
        if num_rows is not None:
            rows.append(x.new_zeros(num_rows - total, *x.shape[1:]))
        out.append((torch.cat(rows),))
    return out


TOGETHER: dict[str, Callable[..., list[Tensor]]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
}
"""Collectives that take a tensor from each rank."""

POSTED: dict[str, Callable[..., list[tuple[Tensor, ...]]]] = {"shift": _shift, "exchange_rows": _exchange_rows}
"""Collectives that are posted first and waited for later."""
