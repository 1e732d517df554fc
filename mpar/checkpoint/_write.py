"""Writes a rank's file of shards from the staging buffer. One pass over blocks that fit into a cache checks that all values are
finite, makes the checksums, and writes."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from mpar.checkpoint._digest import digest, shard_digest
from mpar.checkpoint._disk import write_file
from mpar.checkpoint._layout import BLOCK_BYTES, DTYPES, Layout, Shard
from mpar.checkpoint._staging import Staging
from mpar.errors import NumericsError

__all__ = ["write_shards"]

_LEAST_INFINITE: Mapping[torch.dtype, tuple[type[np.unsignedinteger], int]] = {
    torch.float64: (np.uint64, 0x7FF0_0000_0000_0000),
    torch.float32: (np.uint32, 0x7F80_0000),
    torch.bfloat16: (np.uint16, 0x7F80),
    torch.float16: (np.uint16, 0x7C00),
    torch.float8_e5m2: (np.uint8, 0x7C),
    torch.float8_e4m3fn: (np.uint8, 0x7F),  # it has no infinity, and one NaN
}
"""By dtype: an integer of its size, and the least bits, apart from the sign, of a value that is not finite."""


def write_shards(file: Path, planned: Layout, shards: Mapping[str, Shard], staging: Staging, *, finite: bool) -> dict[str, str]:
    """Write `file`, laid out as `planned`; its bytes are on the disk when this returns. Returns the checksum of each shard.

    finite: raise NumericsError, which names all shards that have a value that is not finite. Raises OSError if the disk refuses.
    """
    staging.settle()
    sums: dict[str, bytes] = {}
    wrong: list[str] = []
    write_file(file, _pieces(planned, shards, staging, sums, wrong if finite else None))
    if wrong:
        shown = wrong if len(wrong) <= 8 else [*wrong[:8], f"and {len(wrong) - 8} more"]
        raise NumericsError("values that are not finite in " + ", ".join(shown))
    return {name: shard_digest(blocks) for name, blocks in sums.items()}


def _pieces(
    planned: Layout, shards: Mapping[str, Shard], staging: Staging, sums: dict[str, bytes], wrong: list[str] | None
) -> Iterator[bytes | memoryview]:
    """The bytes of the file in order. After a wrong value it only looks for others, so that all wrong shards are found."""
    yield planned.header
    buffer, written = staging.buffer, 0
    for name in planned.begins:
        begin, end = staging.slots[name]
        dtype, blocks, is_finite = DTYPES[shards[name].dtype][0], [], True
        for start in range(begin, end, BLOCK_BYTES):
            stop = min(start + BLOCK_BYTES, end)
            block = buffer[start:stop]
            is_finite = is_finite and (wrong is None or _is_finite(block, dtype))
            blocks.append(digest(block))
            if stop - written >= BLOCK_BYTES and not wrong:  # small shards are written together
                yield buffer[written:stop]
                written = stop
        sums[name] = b"".join(blocks)
        if wrong is not None and not is_finite:
            wrong.append(f"{name} {shards[name].shape}")
    if not wrong:
        yield buffer[written:]
        yield b"".join(sums[name] for name in planned.checksums)


def _is_finite(block: memoryview, dtype: torch.dtype) -> bool:
    """Whether all values are finite. Their bits are compared, since numpy has no bfloat16, and arithmetic takes longer."""
    if dtype not in _LEAST_INFINITE:
        return True
    integer, least = _LEAST_INFINITE[dtype]
    unsigned = np.bitwise_and(np.frombuffer(block, integer), np.iinfo(integer).max >> 1)
    return bool(unsigned.max() < least)
