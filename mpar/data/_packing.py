"""Packs documents into sequences, so that few positions are padding."""

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray

__all__ = ["pack"]


def pack(lengths: NDArray[np.int64], capacity: int, max_items: int | None = None) -> list[list[int]]:
    """Pack items into bins by best-fit decreasing: from the longest on, each goes into the fullest bin that has room for it.

    `lengths` (items,) are in [1, capacity]. Returns bins of indices into `lengths`; every index occurs once. Items of equal
    length are taken in their order, so the lengths in each bin depend only on how often each length occurs. There are at most
    11/9 of the fewest possible bins, plus 4 (Johnson, Demers, Ullman, Garey, Graham 1974, SIAM J. Comput. 3(4)). A bin with
    `max_items` items is full.
    """
    assert len(lengths) == 0 or (lengths.min() >= 1 and lengths.max() <= capacity)
    bins: list[list[int]] = []
    open_bins: dict[int, list[int]] = {}  # room left -> bins with that much room
    rooms: list[int] = []  # keys of open_bins, sorted
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        place = bisect_left(rooms, length)
        if place == len(rooms):
            bins.append([item])
            index, room = len(bins) - 1, capacity
        else:
            room = rooms[place]
            index = open_bins[room].pop()
            if not open_bins[room]:
                del open_bins[room], rooms[place]
            bins[index].append(item)
        room_left = room - length
        if room_left and (max_items is None or len(bins[index]) < max_items):
            if room_left not in open_bins:
                open_bins[room_left] = []
                insort(rooms, room_left)
            open_bins[room_left].append(index)
    return bins
