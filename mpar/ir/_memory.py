"""Memory of a segment: which storages its ops make and drop, and the most bytes that it holds at one time.

A storage lives as long as a name refers to it; views share a storage. The peak is measured right after each op, while its
operands still live. A primitive declares its workspace: the bytes that it allocates and frees within one call. `sweep` gives the
peak with or without workspaces.
"""

from dataclasses import dataclass
from functools import lru_cache

__all__ = ["SegmentMemory", "sweep"]


@dataclass(frozen=True)
class SegmentMemory:
    """The storages of one segment, numbered from 0, those of its inputs first.

    inputs / outputs: the number of the storage of each operand and of each result.
    sizes:            the bytes of each storage.
    events:           for each op, the storages that it makes, and those that no later op or result needs.
    workspaces:       for each op, the bytes that it allocates and frees while it runs.
    idle:             the storages of inputs that no op reads and no result lies in.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    sizes: tuple[int, ...]
    events: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    workspaces: tuple[int, ...]
    idle: tuple[int, ...]


@lru_cache(maxsize=4096)
def sweep(memory: SegmentMemory, donated: frozenset[int], *, workspace: bool = False) -> int:
    """The most bytes that the segment holds beyond those that were held before it began.

    donated:   the input storages whose memory is freed when the segment drops them; other inputs live on.
    workspace: whether the workspaces of ops count.
    """
    inputs = set(memory.inputs)
    live = -sum(memory.sizes[storage] for storage in memory.idle if storage in donated)
    peak = 0
    for (made, dropped), op_workspace in zip(memory.events, memory.workspaces, strict=True):
        live += sum(memory.sizes[storage] for storage in made)
        peak = max(peak, live + op_workspace * workspace)
        live -= sum(memory.sizes[storage] for storage in dropped if storage not in inputs or storage in donated)
    return peak
