"""One rank's file of shards, in the format safetensors. Its library writes the file; reading is done here, only the wanted bytes.

The format is an 8-byte little-endian header length, a JSON header {key: {dtype, shape, data_offsets}}, then the data
(https://github.com/huggingface/safetensors, section "Format").
"""

import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

import torch
from safetensors.torch import save_file
from torch import Tensor

from mpar.errors import CheckpointError
from mpar.torch_private import storage_key

__all__ = ["DTYPES", "Box", "ShardFile", "checksum", "dtype_name", "sync", "write_shards"]

Box = tuple[tuple[int, int], ...]
"""The place of a block in a tensor: (first index, size) for each dim."""

DTYPES = {
    "float64": (torch.float64, "F64"),
    "float32": (torch.float32, "F32"),
    "bfloat16": (torch.bfloat16, "BF16"),
    "float16": (torch.float16, "F16"),
    "float8_e4m3fn": (torch.float8_e4m3fn, "F8_E4M3"),
    "float8_e5m2": (torch.float8_e5m2, "F8_E5M2"),
    "int64": (torch.int64, "I64"),
    "int32": (torch.int32, "I32"),
    "int16": (torch.int16, "I16"),
    "int8": (torch.int8, "I8"),
    "uint8": (torch.uint8, "U8"),
    "bool": (torch.bool, "BOOL"),
}
"""The dtypes that a checkpoint may hold, by their name in the index: (torch's dtype, the code of safetensors)."""


def dtype_name(dtype: torch.dtype) -> str:
    """The name of `dtype` in the index: torch's name without the module."""
    return str(dtype).removeprefix("torch.")


def checksum(x: Tensor) -> int:
    """CRC-32 of the bytes of `x`, a contiguous CPU tensor."""
    return zlib.crc32(_bytes_of(x))


def write_shards(file: Path, shards: Mapping[str, Tensor]) -> None:
    """Write contiguous CPU tensors to `file`, and return when they are on the disk."""
    seen: set[int] = set()
    separate: dict[str, Tensor] = {}
    for key, shard in shards.items():
        separate[key] = shard.clone() if storage_key(shard) in seen else shard  # the library refuses tensors that share memory
        seen.add(storage_key(shard))
    save_file(separate, file)
    sync(file)


def sync(path: Path) -> None:
    """Wait until everything that was written to the file or folder `path` is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class ShardFile:
    """A file of shards, open for reading. The header is read at once, data only by `read`.

    Raises CheckpointError, which names the file, if it is missing, unreadable, shorter than its header says, or no safetensors.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        try:
            self._descriptor = os.open(file, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be opened ({error.strerror})") from error
        try:
            self._header, self._start = self._read_header()
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> "ShardFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._descriptor)

    def read(self, key: str, shape: tuple[int, ...], dtype: torch.dtype, box: Box) -> Tensor:
        """The block `box` of the shard `key`, which must have this shape and dtype: a new contiguous tensor.

        Reads only the bytes of the block: one read for each contiguous run that the block has in the file.
        """
        begin = self._begin(key, shape, dtype)
        out = torch.empty([size for _, size in box], dtype=dtype)
        view, position = _bytes_of(out), 0
        for offset, count in _runs(shape, box):
            size = count * dtype.itemsize
            self._fill(view[position : position + size], begin + offset * dtype.itemsize)
            position += size
        return out

    def _begin(self, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """The position in the file at which the data of shard `key` begin."""
        entry = self._header.get(key)
        expected = {"dtype": DTYPES[dtype_name(dtype)][1], "shape": list(shape)}
        actual = {name: entry.get(name) for name in expected} if isinstance(entry, dict) else None
        if entry is None or actual != expected:
            raise CheckpointError(f"{self._file}: the header says {actual} of {key!r}, the index {expected}; the file is damaged")
        begin, end = entry["data_offsets"]
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise CheckpointError(f"{self._file}: {key!r} takes {end - begin} bytes, which does not fit {expected}; damaged")
        return self._start + begin

    def _read_header(self) -> tuple[dict, int]:
        size = os.fstat(self._descriptor).st_size
        prefix = bytearray(8)
        if size < 8:
            raise CheckpointError(f"{self._file}: has {size} bytes, too few for a safetensors file; it is truncated")
        self._fill(memoryview(prefix), 0)
        length = int.from_bytes(prefix, "little")
        if length > size - 8:
            raise CheckpointError(f"{self._file}: the header should take {length} bytes, the file has {size}; it is damaged")
        raw = bytearray(length)
        self._fill(memoryview(raw), 8)
        try:
            header = json.loads(raw)
            entries = [entry for key, entry in header.items() if key != "__metadata__"]
            ends = [end for _, end in (map(int, entry["data_offsets"]) for entry in entries)]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{self._file}: the header cannot be read ({error}); the file is damaged") from error
        if 8 + length + max(ends, default=0) != size:
            expected = 8 + length + max(ends, default=0)
            raise CheckpointError(f"{self._file}: has {size} bytes, its header says {expected}; it is truncated or damaged")
        return header, 8 + length

    def _fill(self, view: memoryview, position: int) -> None:
        while view:
            count = os.preadv(self._descriptor, [view], position)
            if count == 0:
                raise CheckpointError(f"{self._file}: ends at byte {position} while being read")
            view, position = view[count:], position + count


def _runs(shape: tuple[int, ...], box: Box) -> Iterator[tuple[int, int]]:
    """(first element, number of elements) of every contiguous run of `box` in a row-major tensor of `shape`, in order."""
    split = len(shape)  # the block covers all of the dims from `split` on
    while split and box[split - 1] == (0, shape[split - 1]):
        split -= 1
    if any(size == 0 for _, size in box):
        return
    run = math.prod(shape[split:])
    if split == 0:
        yield 0, run
        return
    first, count = box[split - 1]
    starts = [0]
    for dim in range(split - 1):
        offset, size = box[dim]
        starts = [start * shape[dim] + index for start in starts for index in range(offset, offset + size)]
    for start in starts:
        yield (start * shape[split - 1] + first) * run, count * run


def _bytes_of(x: Tensor) -> memoryview:
    return x.reshape(-1).view(torch.uint8).numpy().data
