"""What a collective means, on lists: given what each rank of a group holds, what each holds after it. No process, no mesh."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["combine", "fold"]


def fold(parts: Sequence[Tensor], op: str = "sum") -> Tensor:
    """Reduce in the order given, from the left: the one order of addition that runtime and simulator share."""
    return functools.reduce(torch.add if op == "sum" else torch.maximum, parts)


def combine(kind: str, parts: Sequence[Any], **how: Any) -> list[Any]:
    """The results on the ranks of a group, in its order, of the collective `kind` on `parts`; new tensors, contiguous.

    all_gather(dim), reduce_scatter(dim), all_reduce(op), all_to_all(src, dst). Of those that are posted, shift and
    exchange_rows(num_rows), a part is all operands of a rank, and a result a tuple.
    """
    n = len(parts)
    if kind == "shift":
        return [tuple(x.clone() for x in parts[rank - 1][0]) for rank in range(n)]
    if kind == "exchange_rows":
        return _exchange_rows(parts, **how)
    if kind == "all_gather":
        return [torch.cat(list(parts), how["dim"]) for _ in parts]
    if kind == "reduce_scatter":
        chunks = [part.chunk(n, how["dim"]) for part in parts]
        return [fold([chunk[rank] for chunk in chunks]).contiguous() for rank in range(n)]
    if kind == "all_reduce":
        total = fold(parts, how["op"])
        return [total.clone(memory_format=torch.contiguous_format) for _ in parts]
    assert kind == "all_to_all", kind
    chunks = [part.chunk(n, how["dst"]) for part in parts]
    return [torch.cat([chunk[rank] for chunk in chunks], how["src"]) for rank in range(n)]


def _exchange_rows(parts: Sequence[Any], *, num_rows: int | None) -> list[tuple[Tensor]]:
    cut = [x[: int(sent.sum())].split(sent.tolist()) for (x,), sent, _ in parts]
    out = []
    for rank, ((x,), _, received) in enumerate(parts):
        rows = [pieces[rank] for pieces in cut]
        assert [len(piece) for piece in rows] == received.tolist(), "ranks disagree about the rows that they exchange"
        total = sum(len(piece) for piece in rows)
        if num_rows is not None:
            rows.append(x.new_zeros(num_rows - total, *x.shape[1:]))
        out.append((torch.cat(rows),))
    return out
