"""Compares what several ranks hold copies of. A copy that differs shows a fault of memory or of a device."""

from collections import Counter, defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from mpar.program import Program, State

__all__ = ["bit_sum", "replica_problems", "sums_of_all"]

_BITS = 52  # a float64 holds them exactly, and one bit more

Sums = dict[int, dict[str, int]]
"""By rank, for each leaf that it holds, the sum of the bits of its shard."""


def bit_sum(x: Tensor) -> int:
    """The sum of the bytes of `x`, read as 64-bit integers, in 52 bits. One flipped bit always changes it."""
    raw = x.detach().contiguous().reshape(-1).view(torch.uint8)
    body = raw[: len(raw) // 8 * 8]
    if body.storage_offset() % 8:
        body = body.clone()
    tail = raw[len(body) :].to(torch.int64)
    weights = torch.arange(len(tail), device=x.device) * 8
    total = (int(body.view(torch.int64).sum()) + int((tail << weights).sum())) % 2**64
    return (total ^ (total >> _BITS)) & ((1 << _BITS) - 1)


def sums_of_all(program: Program, state: State, rank: int, agree: Callable[[list[float]], list[float]]) -> Sums:
    """The sums of all ranks. agree: called by all ranks together, gives each the highest of all ranks' values, one by one."""
    size, paths = program.mesh.size, [[leaf.path for leaf in part.state_out] for part in program.parts]
    width = max(map(len, paths))
    mine = [float(bit_sum(state.leaves[path])) for path in paths[program.position(rank)]]
    values = [-1.0] * (size * width)  # below every sum
    values[rank * width : rank * width + len(mine)] = mine
    found = agree(values)
    return {
        other: {path: int(found[other * width + i]) for i, path in enumerate(paths[program.position(other)])}
        for other in range(size)
    }


def replica_problems(program: Program, sums: Sums) -> list[str]:
    """A line for every shard of which ranks hold different copies. Of three copies or more the majority tells which is wrong."""
    copies: dict[tuple[str, tuple[int, ...]], dict[int, int]] = defaultdict(dict)
    for rank, by_path in sums.items():
        for leaf in program.part(rank).state_out:
            place = tuple(program.mesh.index(rank, leaf.spec.dim(dim)) for dim in range(len(leaf.shape)))
            copies[leaf.path, place][rank] = by_path[leaf.path]
    problems = []
    for (path, _), by_rank in copies.items():
        common, votes = Counter(by_rank.values()).most_common(1)[0]
        odd = [rank for rank, value in by_rank.items() if value != common]
        if not odd:
            continue
        if 2 * votes > len(by_rank):
            which = f"rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))} against {votes} others"
        else:
            which = f"ranks {', '.join(map(str, by_rank))}, of which none has a majority"
        problems.append(f"{path}: {which}")
    return problems
