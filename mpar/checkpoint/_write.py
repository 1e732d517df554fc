"""Writes a rank's file of shards from the staging buffer. One pass over pieces that fit into a cache checks that all values are
finite, makes the checksums, and writes."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from mpar.checkpoint._digest import block_digests, shard_digest
from mpar.checkpoint._disk import write_file
from mpar.checkpoint._layout import BLOCK_BYTES, DTYPES, Layout, Shard
from mpar.checkpoint._staging import Staging
from mpar.errors import NumericsError

__all__ = ["write_shards"]

_PIECE_BYTES = 4 * BLOCK_BYTES  # fewer calls than for blocks, and still within the cache of a core
_LEAST_INFINITE: Mapping[torch.dtype, tuple[str, int]] = {
    torch.float64: ("i8", 0x7FF0_0000_0000_0000),
    torch.float32: ("i4", 0x7F80_0000),
    torch.bfloat16: ("i2", 0x7F80),
    torch.float16: ("i2", 0x7C00),
    torch.float8_e5m2: ("i1", 0x7C),
    torch.float8_e4m3fn: ("i1", 0x7F),  # it has no infinity, and one NaN
}
"""By dtype: an integer of its size, and the least bits of a positive value that is not finite."""


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
        for start in range(begin, end, _PIECE_BYTES):
            stop = min(start + _PIECE_BYTES, end)
            piece = buffer[start:stop]
            is_finite = is_finite and (wrong is None or _is_finite(piece, dtype))
            blocks.append(block_digests(piece))
            if stop - written >= _PIECE_BYTES and not wrong:  # small shards are written together
                yield buffer[written:stop]
                written = stop
        sums[name] = b"".join(blocks)
        if wrong is not None and not is_finite:
            wrong.append(f"{name} {shards[name].shape}")
    if not wrong:
        yield buffer[written:]
        yield b"".join(sums[name] for name in planned.checksums)


def _is_finite(piece: memoryview, dtype: torch.dtype) -> bool:
    """Whether all values are finite. Their bits are compared, since numpy has no bfloat16, and arithmetic takes longer: as signed
    integers the greatest is the positive value of the most bits, as unsigned ones the negative value.
    """
    if dtype not in _LEAST_INFINITE or not piece:
        return True
    integer, least = _LEAST_INFINITE[dtype]
    signed = np.frombuffer(piece, integer)
    sign = 1 << (8 * signed.itemsize - 1)
    return int(signed.max()) < least and int(signed.view(f"u{signed.itemsize}").max()) < sign + least
