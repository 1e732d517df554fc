"""Memory of a segment: which storages it makes and drops, and the highest number of bytes that it needs.

A storage lives while a name refers to it; views share one. The peak is taken right after each op, when its operands are still
there. What a primitive allocates and frees within one call is its workspace, which it declares; peaks are known with and without.
"""

from dataclasses import dataclass
from functools import lru_cache

__all__ = ["SegmentMemory", "sweep"]


@dataclass(frozen=True)
class SegmentMemory:
    """Storages of one segment, numbered from 0: first those of its inputs.

    inputs / outputs: the storage of each operand and result; sizes: bytes of each storage.
    events:           per op, the storages that it makes and those whose last name goes with it.
    workspaces:       per op, bytes that are there only while it runs.
    idle:             input storages that no op reads.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    sizes: tuple[int, ...]
    events: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    workspaces: tuple[int, ...]
    idle: tuple[int, ...]


@lru_cache(maxsize=4096)
def sweep(memory: SegmentMemory, donated: frozenset[int], *, workspace: bool = False) -> int:
    """The highest number of bytes above the start while the segment runs; `donated` input storages go when it drops them.

    workspace: what ops hold while they run counts too.
    """
    inputs = set(memory.inputs)
    live = -sum(memory.sizes[storage] for storage in memory.idle if storage in donated)
    peak = 0
    for (made, dropped), within in zip(memory.events, memory.workspaces, strict=True):
        live += sum(memory.sizes[storage] for storage in made)
        peak = max(peak, live + within * workspace)
        live -= sum(memory.sizes[storage] for storage in dropped if storage not in inputs or storage in donated)
    return peak
