"""Reads checkpoints of format version 1, which nothing writes any more: CRC-32 of whole shards, and an index that names files and
sizes.

A rank that wants a part of a shard reads all of it, as nothing smaller has a checksum. state.json has a checksum of its own,
which the index does not know; it must have the size and the step that the index says.
"""

import json
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from mpar.checkpoint._files import OpenFile, count_of, fill, is_name, parse_json
from mpar.checkpoint._index import Entry, Index, Written, count_table, dtype_of, entry_of, shape_of
from mpar.checkpoint._layout import DTYPES, Box, Shard, file_name
from mpar.checkpoint._slabs import AT_ONCE_BYTES, copy_box
from mpar.errors import CheckpointError, MeshError
from mpar.mesh import Mesh

__all__ = ["Version1File", "parse_index_1", "parse_state_1"]

_FILE = re.compile(r"rank-(\d{5,9})\.safetensors")
_LARGEST_HEADER = 10**8  # of safetensors' own reader


def parse_index_1(file: Path, raw: Mapping) -> Index:
    """The index in the value `raw` of an `index.json`. Raises CheckpointError unless it is sound."""
    try:
        body = raw["index"]
        if raw["crc32"] != _crc32(body):
            raise CheckpointError(f"{file}: does not fit its own checksum; it is damaged. Use another checkpoint.")
        mesh, sizes = Mesh(**count_table(body["mesh"])), count_table(body["files"])
        tensors = {name: _entry(name, entry) for name, entry in body["tensors"].items()}
        index = Index(
            count_of(body["step"]), mesh.sizes, sizes.pop("state.json"), "", tensors, 1, {_rank(f): n for f, n in sizes.items()}
        )
    except (KeyError, TypeError, ValueError, AttributeError, MeshError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file}: is not the index of a checkpoint ({error}); it is damaged") from error
    if index.by_rank.keys() != index.file_bytes.keys():
        raise CheckpointError(f"{file}: lists other files than its tensors are in; it is damaged")
    return index


def parse_state_1(file: Path, index: Index, content: bytes) -> dict:
    """The extras in the bytes of a `state.json`. Raises CheckpointError unless they fit their checksum and the step of the
    index.
    """
    raw = parse_json(file, content)
    extras = raw.get("extras") if isinstance(raw, dict) else None
    if not isinstance(raw, dict) or not isinstance(extras, dict):
        raise CheckpointError(f"{file}: is not the state of a checkpoint; it is damaged.")
    if raw.get("crc32") != _crc32(extras) or len(content) != index.state_bytes:
        raise CheckpointError(
            f"{file}: does not fit its own checksum, or the size in the index; it is damaged. Use another checkpoint."
        )
    if extras.get("step") != index.step:
        raise CheckpointError(
            f"{file}: is of step {extras.get('step')}, the index of step {index.step}; it is of another checkpoint"
        )
    return extras


class Version1File(OpenFile):
    """The file of one rank, open for reading; for its methods see ShardFile."""

    def __init__(self, file: Path, size: int, shards: Mapping[str, Written]) -> None:
        super().__init__(file)
        self._shards = shards
        try:
            actual = os.fstat(self._descriptor).st_size
            if actual != size:
                raise CheckpointError(f"{file}: has {actual} bytes, the index says {size}; it is truncated or damaged")
            self._begins = self._read_header(size)
        except BaseException:
            self.close()
            raise

    def read(self, name: str, box: Box, target: Tensor) -> None:
        """Fill `target` with the block `box` of the shard of tensor `name`, after the whole shard was compared with its
        CRC-32.
        """
        written, begin = self._shards[name], self._begins[name]
        crc, buffer = 0, memoryview(bytearray(min(AT_ONCE_BYTES, written.shard.num_bytes)))
        for position in range(0, written.shard.num_bytes, AT_ONCE_BYTES):
            piece = buffer[: min(AT_ONCE_BYTES, written.shard.num_bytes - position)]
            fill(self._descriptor, self._file, piece, begin + position)
            crc = zlib.crc32(piece, crc)
        if crc != int(written.checksum):
            raise CheckpointError(f"{self._file}: the bytes of {name!r} do not fit their checksum; the file is damaged")
        copy_box(
            written.shard.shape, box, target, lambda view, position: fill(self._descriptor, self._file, view, begin + position)
        )

    def _read_header(self, size: int) -> dict[str, int]:
        """The position of every shard, by the name of its tensor."""
        prefix = bytearray(8)
        fill(self._descriptor, self._file, memoryview(prefix), 0)
        length = int.from_bytes(prefix, "little")
        if length > min(size - 8, _LARGEST_HEADER):
            raise CheckpointError(f"{self._file}: the header should take {length} bytes, the file has {size}; it is damaged")
        content = bytearray(length)
        fill(self._descriptor, self._file, memoryview(content), 8)
        try:
            header = parse_json(self._file, bytes(content))
            if isinstance(header, dict):
                header.pop("__metadata__", None)
            expected = {
                name: {"dtype": DTYPES[w.shard.dtype][1], "shape": list(w.shard.shape)} for name, w in self._shards.items()
            }
            if not isinstance(header, dict):
                raise TypeError("it is no table")
            ranges = {name: shape_of(entry.pop("data_offsets")) for name, entry in header.items()}
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{self._file}: the header cannot be read ({error}); the file is damaged") from error
        end = 0
        for name in sorted(ranges, key=lambda name: ranges[name]):
            num_bytes = self._shards[name].shard.num_bytes if name in self._shards else 0
            if ranges[name] != (end, end + num_bytes):
                end = -1
                break
            end += num_bytes
        if header != expected or 8 + length + end != size:
            raise CheckpointError(f"{self._file}: its header does not list what the index does; it is damaged")
        return {name: 8 + length + begin for name, (begin, _) in ranges.items()}


def _entry(name: str, raw: Mapping) -> Entry:
    shape, dtype = shape_of(raw["shape"]), dtype_of(raw["dtype"])
    blocks = {}
    for shard in raw["shards"]:
        offsets, block, crc32 = shape_of(shard["offsets"]), shape_of(shard["shape"]), str(count_of(shard["crc32"]))
        if shard["key"] != name or not is_name(name) or offsets in blocks:
            raise ValueError(f"{name} has a shard that is not its own, or two at the same place")
        blocks[offsets] = (_rank(shard["file"]), Written(Shard(shape, dtype, offsets, block), crc32))
    if len({written.shard.shape for _, written in blocks.values()}) != 1:
        raise ValueError(f"{name} has no shards, or of different shapes")
    return entry_of(blocks)


def _rank(file: object) -> int:
    match = _FILE.fullmatch(file) if isinstance(file, str) else None
    if match is None or file != file_name(int(match[1])):
        raise ValueError(f"{str(file)[:80]!r} is not the name of a rank's file")
    return int(match[1])


def _crc32(body: object) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
