"""Batching rules that fit many ops: one more leading dim, a batch folded into dim 0, or example by example.

A batching rule is `rule(size, dims, *operands, **params) -> (results, dims of results)`; `dims` has each operand's batched dim,
or None.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mpar.ops.primitive._sharding_rule import ShardingRule

__all__ = ["BatchingRule", "batch_by_loop", "batch_folded", "batch_leading"]

Results = Tensor | tuple[Tensor, ...]
Batched = tuple[Results, int | tuple[int, ...]]
BatchingRule = Callable[..., Batched]


def batch_by_loop(bind: Callable[..., Results]) -> BatchingRule:
    """Apply the op example by example and stack: for ops whose operands have no room for one more dim."""

    def rule(size: int, dims: Sequence[int | None], *operands: Tensor | None, **params: object) -> Batched:
        per_example = []
        for i in range(size):
            example = [x if x is None or d is None else x.select(d, i) for x, d in zip(operands, dims, strict=True)]
            per_example.append(bind(*example, **params))
        if isinstance(per_example[0], Tensor):
            return torch.stack(per_example), 0  # type: ignore[arg-type]
        return tuple(torch.stack(column) for column in zip(*per_example, strict=True)), (0,) * len(per_example[0])

    return rule


def batch_leading(bind: Callable[..., Results], sharding_rule: Callable[..., ShardingRule]) -> BatchingRule:
    """Give every operand whose sharding rule starts with `...` one more leading dim; the others must not be batched, else the
    batch is done example by example."""
    loop = batch_by_loop(bind)

    def rule(size: int, dims: Sequence[int | None], *operands: Tensor | None, **params: object) -> Batched:
        sharding = sharding_rule(**params)
        moved = _moved(size, dims, operands, sharding, (("...",),))
        if moved is None:
            return loop(size, dims, *operands, **params)
        results = bind(*moved, **params)
        return results, (0 if isinstance(results, Tensor) else (0,) * len(results))

    return rule


def batch_folded(bind: Callable[..., Results], sharding_rule: Callable[..., ShardingRule]) -> BatchingRule:
    """Fold the batch into dim 0 of every operand whose sharding rule starts with the first factor of the first operand; the
    others must not be batched, else the batch is done example by example."""
    loop = batch_by_loop(bind)

    def rule(size: int, dims: Sequence[int | None], *operands: Tensor | None, **params: object) -> Batched:
        sharding = sharding_rule(**params)
        first = sharding.operands[0][:1]
        moved = _moved(size, dims, operands, sharding, first)
        if moved is None:
            return loop(size, dims, *operands, **params)
        starts = [factors[:1] == first for factors in sharding.operands]
        folded = [x if x is None or not start else x.flatten(0, 1) for x, start in zip(moved, starts, strict=True)]
        results = bind(*folded, **params)
        if isinstance(results, Tensor):
            return results.unflatten(0, (size, -1)), 0
        return tuple(result.unflatten(0, (size, -1)) for result in results), (0,) * len(results)

    return rule


def _moved(
    size: int,
    dims: Sequence[int | None],
    operands: Sequence[Tensor | None],
    sharding: ShardingRule,
    first: tuple[tuple[str, ...], ...],
) -> list[Tensor | None] | None:
    """The operands, those whose rule starts with `first` with the batch in front; None if another operand is batched, or if a
    result does not start so."""
    starts = [factors[:1] == first for factors in sharding.operands]
    stuck = any(dim is not None and not start for dim, start in zip(dims, starts, strict=True))
    if stuck or any(factors[:1] != first for factors in sharding.results):
        return None
    return [
        x if x is None or not start else x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim, start in zip(operands, dims, starts, strict=True)
    ]
