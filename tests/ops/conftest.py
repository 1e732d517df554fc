"""Ranks in one process: runs the local program of a `def_sharded` rule on all shards at once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mpar.ops.primitive import Primitive


class Ranks(list):
    """A value per rank."""


class _Pending:
    def __init__(self, value: Ranks) -> None:
        self.value = value


class _Emit:
    """`emit` over lists: each op runs once per rank; collectives are list operations, counted."""

    def __init__(self, num_ranks: int, factor: str, extents: dict[str, int]) -> None:
        self.num_ranks, self.factor, self.extents, self.collectives = num_ranks, factor, extents, []

    def __call__(self, op: Any, *operands: Any, **params: Any) -> Ranks:
        call = op.op if isinstance(op, Primitive) else op
        return Ranks(
            call(*(_of_rank(x, rank) for x in operands), **{name: _of_rank(x, rank) for name, x in params.items()})
            for rank in range(self.num_ranks)
        )

    @property
    def start(self) -> Ranks:
        return self.start_of(self.factor)

    def start_of(self, factor: str) -> Any:
        return Ranks(rank * self.extents[factor] for rank in range(self.num_ranks)) if factor == self.factor else 0

    def extent_of(self, factor: str) -> int:
        return self.extents[factor]

    def getitem(self, value: Ranks, index: int) -> Ranks:
        return Ranks(item[index] for item in value)

    def all_reduce(self, value: Ranks, op: str) -> Ranks:
        self.collectives.append(op)
        stacked = torch.stack(list(value))
        total = stacked.sum(0) if op == "sum" else stacked.amax(0)
        return Ranks(total for _ in value)

    def pending(self, value: Ranks) -> _Pending:
        return _Pending(value)


def _of_rank(x: Any, rank: int) -> Any:
    if isinstance(x, Ranks):
        return x[rank]
    return [_of_rank(item, rank) for item in x] if isinstance(x, list) else x


@pytest.fixture
def run_sharded() -> Callable[..., tuple[list[Ranks], list[str]]]:
    """`run_sharded(primitive, factor, extents, *operands, **params) -> (results, collectives)`.

    Operands that are sharded are given as lists of shards, `extents` are the local sizes of the factors. A result that the
    rule marks as pending is summed here.
    """

    def run(primitive: Primitive, factor: str, extents: dict[str, int], *operands: Any, **params: Any) -> Any:
        num_ranks = next(len(x) for x in operands if isinstance(x, (list, tuple)))
        emit = _Emit(num_ranks, factor, extents)
        wrapped = [Ranks(x) if isinstance(x, (list, tuple)) else x for x in operands]
        out = primitive.placement.sharded[factor](emit, *wrapped, **params)
        results = [
            Ranks([sum(item.value)] * num_ranks) if isinstance(item, _Pending) else item
            for item in (out if isinstance(out, tuple) else (out,))
        ]
        return results, emit.collectives

    return run
