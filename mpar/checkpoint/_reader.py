"""A checkpoint without a mesh: its tensors, whole or by boxes of a few MiB, in memory that is bounded by what is asked for."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from mpar.checkpoint._index import Entry
from mpar.checkpoint._layout import DTYPES, Box
from mpar.checkpoint._open import open_shards, read_index
from mpar.checkpoint._shard_file import ShardFile
from mpar.checkpoint._slabs import boxes
from mpar.checkpoint._state import Json, read_state
from mpar.checkpoint._version1 import Version1File
from mpar.errors import CheckpointError
from mpar.mesh import Mesh

__all__ = ["Reader", "StoredTensor"]

_MOST_OPEN = 64


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint: global shape, dtype, size in bytes, and into how many shards it was cut."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int
    num_shards: int


class Reader:
    """A checkpoint open for reading; use it in a `with` statement. Every byte that it gives was compared with its checksum.

    step, mesh: when and from which mesh it was saved. extras: its state. version: of its format. tensors: by name.
    Raises CheckpointError if index or state are damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._index = read_index(self.path)
        self.extras: dict[str, Json] = read_state(self.path, self._index)
        self.step, self.mesh, self.version = self._index.step, Mesh(**self._index.mesh), self._index.version
        self.tensors: Mapping[str, StoredTensor] = {name: _stored(entry) for name, entry in self._index.tensors.items()}
        self._open: dict[int, ShardFile | Version1File] = {}

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close()

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """The tensor `name`, or the block `box` of it, (first index, size) for each dim, on the CPU. Raises CheckpointError."""
        entry = self._index.tensors[name]
        box = tuple((0, size) for size in entry.shape) if box is None else box
        parts = [(rank, w.shard, common) for rank, w in entry.written() if (common := intersection(box, w.shard.box)) is not None]
        for rank, _, _ in parts:
            self._file(rank)  # an error if it is smaller than the index says, before memory is taken for what it does not hold
        out = torch.empty([size for _, size in box], dtype=DTYPES[entry.dtype][0])
        for rank, shard, common in parts:
            place = tuple(map(span, relative(common, tuple(first for first, _ in box))))
            self._file(rank).read(name, relative(common, shard.offsets), out[place])
        return out

    def boxes(self, name: str) -> Iterator[Box]:
        """Boxes of at most 4 MiB that cover the tensor `name` exactly once, in row-major order; none if it has no elements."""
        tensor = self.tensors[name]
        return boxes(tensor.shape, tensor.dtype.itemsize)

    def _file(self, rank: int) -> ShardFile | Version1File:
        if rank not in self._open:
            if len(self._open) >= _MOST_OPEN:
                self._close()
            try:
                self._open[rank] = open_shards(self.path, self._index, rank)
            except OSError as error:
                raise CheckpointError(f"cannot read a file of {self.path} ({error.strerror})") from error
        return self._open[rank]

    def _close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()


def _stored(entry: Entry) -> StoredTensor:
    return StoredTensor(entry.shape, DTYPES[entry.dtype][0], entry.num_bytes, len(entry.ranks))


def intersection(one: Box, other: Box) -> Box | None:
    """The block that two blocks have in common; None if they do not overlap."""
    common = []
    for (start, size), (other_start, other_size) in zip(one, other, strict=True):
        first, end = max(start, other_start), min(start + size, other_start + other_size)
        if first >= end:
            return None
        common.append((first, end - first))
    return tuple(common)


def relative(box: Box, offsets: tuple[int, ...]) -> Box:
    """`box` as seen from a block that begins at `offsets`."""
    return tuple((first - start, size) for (first, size), start in zip(box, offsets, strict=True))


def span(dim: tuple[int, int]) -> slice:
    """A dim of a box as a slice."""
    return slice(dim[0], dim[0] + dim[1])
