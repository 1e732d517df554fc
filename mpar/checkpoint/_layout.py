"""What stands where in the file of one rank. It follows from the index alone, so a file is right only if it begins with exactly
this.

The file is one of safetensors (https://github.com/huggingface/safetensors, section "Format"): an 8-byte little-endian length, a
JSON header {name: {dtype, shape, data_offsets}}, then the data. `__checksums__` comes last: 8 bytes for every block of every
shard. The header's `__metadata__` says of which step, mesh and rank the file is, and where its shards lie in their tensors.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

__all__ = ["BLOCK_BYTES", "CHECKSUM_BYTES", "DTYPES", "Box", "Layout", "Shard", "dtype_name", "file_name", "layout", "num_blocks"]

Box = tuple[tuple[int, int], ...]
"""The place of a block in a tensor: (first index, size) for each dim."""

BLOCK_BYTES = 2**17
"""Every shard is checked in blocks of so many bytes, of which the last may be shorter. It is part of the format. Smaller blocks
take more calls for the same bytes, larger ones make a rank that wants a slice of a shard read more around it."""

CHECKSUM_BYTES = 8
_CHECKSUMS = "__checksums__"

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


@dataclass(frozen=True)
class Shard:
    """The part of a tensor that one rank writes: the tensor's shape and dtype, and the part's offsets and shape in it."""

    tensor_shape: tuple[int, ...]
    dtype: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def box(self) -> Box:
        """The part's place in the tensor."""
        return tuple(zip(self.offsets, self.shape, strict=True))

    @property
    def num_bytes(self) -> int:
        """The size of the part in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype][0].itemsize


@dataclass(frozen=True)
class Layout:
    """header: the first bytes of the file. begins: for each tensor the position of its shard. checksums: for each tensor the
    position of the checksums of its blocks. size: of the whole file. Order of all: as in the file. Units: bytes.
    """

    header: bytes
    begins: Mapping[str, int]
    checksums: Mapping[str, int]
    size: int


def file_name(rank: int) -> str:
    """The name of the file of `rank`."""
    return f"rank-{rank:05d}.safetensors"


def num_blocks(size: int) -> int:
    """How many blocks a shard of `size` bytes has."""
    return -(-size // BLOCK_BYTES)


def layout(step: int, mesh: Mapping[str, int], rank: int, shards: Mapping[str, Shard]) -> Layout:
    """The file in which `rank` of a mesh of these sizes saves `shards`, by the name of their tensor. Wide dtypes come first, so
    that every shard is aligned."""
    names = sorted(shards, key=lambda name: (-DTYPES[shards[name].dtype][0].itemsize, name))
    begins, checksums, position, blocks = {}, {}, 0, 0
    for name in names:
        begins[name], checksums[name] = position, blocks * CHECKSUM_BYTES
        position += shards[name].num_bytes
        blocks += num_blocks(shards[name].num_bytes)
    end = position + blocks * CHECKSUM_BYTES
    places = {name: [shards[name].tensor_shape, shards[name].offsets] for name in names}
    about = json.dumps({"step": step, "mesh": dict(mesh), "rank": rank, "places": places}, separators=(",", ":"))
    entries: dict[str, object] = {"__metadata__": {"mpar": about}}
    for name in names:
        offsets = [begins[name], begins[name] + shards[name].num_bytes]
        entries[name] = {"dtype": DTYPES[shards[name].dtype][1], "shape": shards[name].shape, "data_offsets": offsets}
    entries[_CHECKSUMS] = {"dtype": "U8", "shape": [blocks, CHECKSUM_BYTES], "data_offsets": [position, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    start = len(header)
    return Layout(
        header,
        {name: start + begin for name, begin in begins.items()},
        {name: start + position + offset for name, offset in checksums.items()},
        start + end,
    )
