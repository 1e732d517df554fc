"""The index of a checkpoint: for every logical name its global shape, dtype and blocks, and which rank's file holds which block.

`index.json` is `{"crc32": ..., "index": {"version": 2, ...}}`, on one line, so that any version of this code can say which
version it met; the checksum is of the line's part after `"index": `. Version 1, of which the index names files itself, is in
`_version1.py`.
"""

import itertools
import json
import math
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from mpar.checkpoint._digest import shard_digest
from mpar.checkpoint._files import count_of, is_name, parse_json, read_bounded
from mpar.checkpoint._layout import DTYPES, Layout, Shard, layout
from mpar.errors import CheckpointError, MeshError
from mpar.mesh import Mesh

__all__ = [
    "INDEX_NAME",
    "VERSION",
    "Entry",
    "Index",
    "NewerVersionError",
    "Written",
    "count_table",
    "dtype_of",
    "entry_of",
    "index_text",
    "join_entries",
    "parse_index",
    "read_raw_index",
    "shape_of",
    "written_from_json",
]

INDEX_NAME = "index.json"
VERSION = 2

_LARGEST_INDEX = 2**28
"""Of an index in bytes: three times what that of a model of 405 billion parameters, saved from 1,024 ranks, takes."""
_SMALL_INDEX = 2**16
_MOST_DIMS = 64
_HEX = frozenset("0123456789abcdef")
_ENVELOPE = re.compile(rb'\{"crc32": (\d{1,10}), "index": (.*)\}\n', re.DOTALL)


class NewerVersionError(CheckpointError):
    """A checkpoint of a version of the format that this code does not read. It is not damaged."""


@dataclass(frozen=True)
class Written:
    """A shard that a rank has written, and the checksum of its bytes."""

    shard: Shard
    checksum: str


@dataclass(frozen=True)
class Entry:
    """A tensor: its global shape and dtype, and the grid of equal blocks that covers it exactly once.

    ranks, checksums: for each block, in row-major order of the grid, the rank whose file holds it, and the checksum of its bytes.
    copies: (number of a block, rank) for further files that hold it, because several stages do.
    Raises ValueError unless there are as many as the grid has blocks, and a rank holds one of them at most.
    """

    shape: tuple[int, ...]
    dtype: str
    block: tuple[int, ...]
    ranks: tuple[int, ...]
    checksums: tuple[str, ...]
    copies: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        expected = math.prod(self.grid)
        if not len(self.ranks) == len(self.checksums) == expected:
            raise ValueError(
                f"{len(self.ranks)} shards of shape {self.block} with {len(self.checksums)} checksums do not cover {self.shape}: "
                f"{expected} were expected"
            )
        if any(number >= expected for number, _ in self.copies):
            raise ValueError(f"a copy is of none of the {expected} blocks")
        if len({*self.ranks, *(rank for _, rank in self.copies)}) != expected + len(self.copies):
            raise ValueError("a rank holds more than one shard of it")

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of blocks along every dim. Raises ValueError if a block does not divide its tensor."""
        if len(self.block) != len(self.shape) or any(size % one if one else size for size, one in self._dims):
            raise ValueError(f"blocks of shape {self.block} do not divide a tensor of shape {self.shape}")
        return tuple(size // one if one else 1 for size, one in self._dims)

    @property
    def num_bytes(self) -> int:
        """The size of the whole tensor in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype][0].itemsize

    def written(self) -> Iterator[tuple[int, Written]]:
        """(rank, shard) for every block, in row-major order of the grid."""
        places = itertools.product(*(range(count) for count in self.grid))
        for place, rank, checksum in zip(places, self.ranks, self.checksums, strict=True):
            offsets = tuple(i * size for i, size in zip(place, self.block, strict=True))
            yield rank, Written(Shard(self.shape, self.dtype, offsets, self.block), checksum)

    def with_copies(self) -> Iterator[tuple[int, Written]]:
        """(rank, shard) for every block, and for every copy of one."""
        blocks = list(self.written())
        yield from blocks
        for number, rank in self.copies:
            yield rank, blocks[number][1]

    @property
    def _dims(self) -> list[tuple[int, int]]:
        return list(zip(self.shape, self.block, strict=False))


@dataclass(frozen=True)
class Index:
    """The content of `index.json`. state_bytes, state_checksum: of state.json. mesh: the sizes of the axes of the mesh that
    saved. version: of the format, which says how checksums are made.
    """

    step: int
    mesh: Mapping[str, int]
    state_bytes: int
    state_checksum: str
    tensors: Mapping[str, Entry]
    version: int = VERSION
    file_bytes: Mapping[int, int] = field(default_factory=dict)
    """Sizes of the files of ranks in version 1, which says them; in later versions they follow from what a file holds."""

    @cached_property
    def by_rank(self) -> Mapping[int, Mapping[str, Written]]:
        """What the file of every rank holds, by the name of the tensor; ranks that hold nothing have no file."""
        held: dict[int, dict[str, Written]] = defaultdict(dict)
        for name, entry in self.tensors.items():
            for rank, written in entry.with_copies():
                held[rank][name] = written
        return dict(sorted(held.items()))

    def layout(self, rank: int) -> Layout:
        """What stands where in the file of `rank`."""
        return layout(self.step, self.mesh, rank, {name: written.shard for name, written in self.by_rank[rank].items()})

    def size_of_file(self, rank: int) -> int:
        """The size in bytes of the file of `rank`."""
        return self.file_bytes[rank] if self.version == 1 else self.layout(rank).size


def join_entries(parts: Mapping[int, Mapping[str, Written]]) -> tuple[dict[str, Entry], list[str]]:
    """(the tensors that the ranks have written, by name, the problems found, one line each).

    If several ranks hold the same block, because a tensor is on more than one stage, those after the first hold copies; the
    checksums of all must be equal.
    """
    problems: list[str] = []
    tensors: dict[str, dict[tuple[int, ...], tuple[int, Written]]] = defaultdict(dict)
    copies: dict[str, list[tuple[tuple[int, ...], int]]] = defaultdict(list)
    for rank, part in sorted(parts.items()):
        for name, written in part.items():
            shard, blocks = written.shard, tensors[name]
            first = next(iter(blocks.values()), (rank, written))[1].shard
            if (first.tensor_shape, first.dtype, first.shape) != (shard.tensor_shape, shard.dtype, shard.shape):
                problems.append(
                    f"{name} is {first.dtype} {first.tensor_shape} in shards {first.shape} on one rank, "
                    f"{shard.dtype} {shard.tensor_shape} in shards {shard.shape} on another"
                )
            elif blocks.setdefault(shard.offsets, (rank, written))[1].checksum != written.checksum:
                problems.append(f"{name} at {shard.offsets} is held by several stages, with different values")
            elif blocks[shard.offsets][0] != rank:
                copies[name].append((shard.offsets, rank))
    entries = {}
    for name, blocks in sorted(tensors.items()) if not problems else ():
        try:
            entries[name] = entry_of(blocks, copies[name])
        except ValueError as error:
            problems.append(f"{name}: {error}. Is a rank's part missing?")
    return entries, problems


def entry_of(blocks: Mapping[tuple[int, ...], tuple[int, Written]], copies: Sequence[tuple[tuple[int, ...], int]] = ()) -> Entry:
    """The entry of the tensor with these blocks, by their offsets: (rank, shard). All must be of the same tensor and shape.

    copies: (offsets, rank) for further ranks that hold a block. Raises ValueError unless blocks are a grid that covers the tensor
    exactly once.
    """
    ordered = [blocks[offsets] for offsets in sorted(blocks)]
    numbers = {offsets: number for number, offsets in enumerate(sorted(blocks))}
    shard = ordered[0][1].shard
    ranks, checksums = tuple(rank for rank, _ in ordered), tuple(written.checksum for _, written in ordered)
    numbered = tuple((numbers[offsets], rank) for offsets, rank in copies)
    entry = Entry(shard.tensor_shape, shard.dtype, shard.shape, ranks, checksums, numbered)
    if any(written.shard.offsets != one[1].shard.offsets for (_, written), one in zip(entry.written(), ordered, strict=True)):
        raise ValueError(f"shards of shape {shard.shape} at {sorted(blocks)[:8]} do not cover {shard.tensor_shape} exactly once")
    return entry


def index_text(index: Index) -> str:
    """The content of `index.json`: the only one that `parse_index` takes for this index. Raises CheckpointError if it is too
    long.
    """
    tensors = {name: dict(vars(entry)) for name, entry in index.tensors.items()}
    state = {"bytes": index.state_bytes, "checksum": index.state_checksum}
    body = {"version": VERSION, "step": index.step, "mesh": dict(index.mesh), "state": state, "tensors": tensors}
    dumped = json.dumps(body, separators=(",", ":"))
    text = f'{{"crc32": {zlib.crc32(dumped.encode())}, "index": {dumped}}}\n'
    if len(text) > _LARGEST_INDEX:
        raise CheckpointError(
            f"the index of step {index.step} would have {len(text)} bytes; at most {_LARGEST_INDEX} are read back"
        )
    return text


def read_raw_index(folder: Path) -> tuple[int, bytes, dict]:
    """(the format version of `index.json`, its bytes, the value in it), with nothing checked but that version.

    Raises CheckpointError if there is none, if it is damaged, or if a newer version wrote it.
    """
    file = folder / INDEX_NAME
    if not os.path.lexists(file):
        raise CheckpointError(
            f"cannot read the checkpoint {folder}: it has no {INDEX_NAME}.\n"
            "Pass one checkpoint's own folder (latest(folder) gives the newest); one without an index was never finished."
        )
    content = read_bounded(file, _largest_index(folder))
    raw = parse_json(file, content)
    body = raw.get("index") if isinstance(raw, dict) else None
    if not isinstance(raw, dict) or not isinstance(body, dict):
        raise CheckpointError(f"{file}: is not the index of a checkpoint; it is damaged")
    version = body.get("version")
    if type(version) is not int or version < 1:
        raise CheckpointError(f"{file}: says no format version; it is damaged")
    if version > VERSION:
        envelope = _ENVELOPE.fullmatch(content)
        if envelope is None or int(envelope[1]) != zlib.crc32(envelope[2]):
            raise CheckpointError(f"{file}: does not fit its own checksum; it is damaged")
        raise NewerVersionError(
            f"{file}: has format version {version}, this code reads versions 1 to {VERSION}: a newer mpar wrote it. Update mpar."
        )
    return version, content, raw


def _largest_index(folder: Path) -> int:
    """How many bytes an index in `folder` may have: it says less of a shard than eight times what the shard's own file does."""
    try:
        sizes = [file.stat().st_size for file in folder.glob("rank-*.safetensors")]
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {folder} ({error.strerror})") from error
    return min(_LARGEST_INDEX, _SMALL_INDEX + 8 * sum(sizes))


def parse_index(file: Path, content: bytes, raw: Mapping) -> Index:
    """The index of version 2 in `content`, of which `raw` is the value. Raises CheckpointError unless all of it is as written."""
    try:
        body = raw["index"]
        tensors = {name: _entry(name, entry) for name, entry in body["tensors"].items()}
        mesh, state = Mesh(**count_table(body["mesh"])), body["state"]
        index = Index(count_of(body["step"]), mesh.sizes, count_of(state["bytes"]), _checksum(state["checksum"]), tensors)
        if any(rank >= mesh.size for entry in tensors.values() for rank, _ in entry.with_copies()):
            raise ValueError(f"it has shards of ranks that {mesh} does not have")
    except (KeyError, TypeError, ValueError, AttributeError, MeshError) as error:
        raise CheckpointError(f"{file}: is not the index of a checkpoint ({error}); it is damaged") from error
    if index_text(index).encode() != content:
        raise CheckpointError(f"{file}: does not fit its own checksum, or is not as it was written; it is damaged")
    return index


def count_table(raw: object) -> dict[str, int]:
    """The counts by name in a table of JSON, such as the sizes of a mesh. Raises ValueError."""
    if not isinstance(raw, dict):
        raise ValueError("a table of counts is none")
    return {name: count_of(value) for name, value in raw.items()}


def shape_of(raw: object) -> tuple[int, ...]:
    """A shape or offsets from JSON. Raises ValueError."""
    if not isinstance(raw, list) or len(raw) > _MOST_DIMS:
        raise ValueError(f"what should be a shape is no list of at most {_MOST_DIMS} counts")
    return tuple(map(count_of, raw))


def dtype_of(raw: object) -> str:
    """The name of a dtype from JSON. Raises ValueError."""
    if not isinstance(raw, str) or raw not in DTYPES:
        raise ValueError(f"dtype {str(raw)[:40]!r} is unknown")
    return raw


def written_from_json(raw: object) -> Written:
    """The inverse of `dataclasses.asdict` and JSON. Raises KeyError, TypeError or ValueError if `raw` is not that."""
    if not isinstance(raw, dict):
        raise TypeError("a shard must be a table")
    shard = raw["shard"]
    shapes = [shape_of(shard[key]) for key in ("tensor_shape", "offsets", "shape")]
    return Written(Shard(shapes[0], dtype_of(shard["dtype"]), shapes[1], shapes[2]), _checksum(raw["checksum"]))


def _entry(name: object, raw: dict) -> Entry:
    if not is_name(name):
        raise ValueError(f"{str(name)[:40]!r} cannot name a tensor")
    ranks, checksums, copies = raw["ranks"], raw["checksums"], raw["copies"]
    if not all(isinstance(value, list) for value in (ranks, checksums, copies)):
        raise TypeError(f"ranks, checksums or copies of {name} are no list")
    entry = Entry(
        shape_of(raw["shape"]),
        dtype_of(raw["dtype"]),
        shape_of(raw["block"]),
        tuple(map(count_of, ranks)),
        tuple(map(_checksum, checksums)),
        tuple((count_of(number), count_of(rank)) for number, rank in copies),
    )
    if entry.num_bytes == 0 and any(checksum != shard_digest(b"") for checksum in entry.checksums):
        raise ValueError(f"{name} has no bytes, but a checksum of some")
    return entry


def _checksum(raw: object) -> str:
    if not isinstance(raw, str) or len(raw) != 16 or not _HEX.issuperset(raw):
        raise ValueError(f"{str(raw)[:40]!r} is not a checksum")
    return raw
