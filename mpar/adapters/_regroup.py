"""Regroup: which dims a reshape merges or divides, in groups that are independent of each other."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Regroup", "regroup"]


@dataclass(frozen=True)
class Regroup:
    """The dims `old`, of sizes `old_sizes`, become dims of `sizes`."""

    old: slice
    old_sizes: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def unchanged(self) -> bool:
        """Whether the dims remain what they are."""
        return self.old_sizes == self.sizes


def regroup(before: Sequence[int], after: Sequence[int]) -> list[Regroup] | None:
    """The groups of a reshape, as small as they can be; `after` may have one -1. None if the numbers of elements differ."""
    known = math.prod(size for size in after if size != -1)
    sizes = [math.prod(before) // known if size == -1 and known else size for size in after]
    if math.prod(sizes) != math.prod(before) or math.prod(before) == 0:
        return None
    groups, i, j = [], 0, 0
    while i < len(before) or j < len(sizes):
        start_i, start_j = i, j
        left, right = 1, 1
        if i < len(before) and j < len(sizes):
            left, right, i, j = before[i], sizes[j], i + 1, j + 1
        while left != right or (i < len(before)) != (j < len(sizes)):
            if (left <= right and i < len(before)) or j == len(sizes):
                left, i = left * before[i], i + 1
            else:
                right, j = right * sizes[j], j + 1
        groups.append(Regroup(slice(start_i, i), tuple(before[start_i:i]), tuple(sizes[start_j:j])))
    return groups
