"""Batching rules that fit many ops: the batch as one more leading dim, the batch folded into dim 0, or a loop over examples.

A batching rule is `rule(size, dims, *operands, **params) -> (results, dims of results)`: `size` is that of the batch, `dims` has
the batched dim of each operand, or None for an operand without one.
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
    """Apply the op to one example after the other and stack the results: for ops that cannot take one more dim."""

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
    """Give one more leading dim to every operand whose sharding rule starts with `...`. If another operand is batched, the op is
    applied to one example after the other."""
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
    """Fold the batch into dim 0 of every operand whose sharding rule starts with the first factor of the first operand. If
    another operand is batched, the op is applied to one example after the other."""
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
    """The operands, with the batch as dim 0 of those whose rule starts with `first`. None if another operand is batched, or if
    the rule of a result does not start with `first`."""
    starts = [factors[:1] == first for factors in sharding.operands]
    others_batched = any(dim is not None and not start for dim, start in zip(dims, starts, strict=True))
    if others_batched or any(factors[:1] != first for factors in sharding.results):
        return None
    return [
        x if x is None or not start else x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim, start in zip(operands, dims, starts, strict=True)
    ]
