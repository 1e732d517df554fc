"""Bin-packing of documents into sequences, so that few positions are padding."""

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray

__all__ = ["pack"]


def pack(lengths: NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Best-fit decreasing: the longest item first, each into the fullest bin that still has room for it.

    `lengths` (items,) are in [1, capacity]. Returns bins of indices into `lengths`; every index occurs once. Which item of
    several equal ones goes where follows from their order alone, so the bins as lists of lengths depend on the multiset only.
    Takes at most 11/9 of the fewest possible bins plus 4 (Johnson, Demers, Ullman, Garey, Graham 1974, SIAM J. Comput. 3(4)).
    """
    assert len(lengths) == 0 or (lengths.min() >= 1 and lengths.max() <= capacity)
    bins: list[list[int]] = []
    open_bins: dict[int, list[int]] = {}  # room left -> bins with that much
    rooms: list[int] = []  # its keys, sorted
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        at = bisect_left(rooms, length)
        if at == len(rooms):
            bins.append([item])
            index, room = len(bins) - 1, capacity
        else:
            room = rooms[at]
            index = open_bins[room].pop()
            if not open_bins[room]:
                del open_bins[room], rooms[at]
            bins[index].append(item)
        left = room - length
        if left:
            if left not in open_bins:
                open_bins[left] = []
                insort(rooms, left)
            open_bins[left].append(index)
    return bins
