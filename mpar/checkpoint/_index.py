"""The index of a checkpoint: for every logical name its global shape and dtype, and which file holds which block of it.

`index.json` is `{"crc32": ..., "index": {...}}`; the checksum is of the canonical dump of the index (keys sorted, no spaces).
"""

import json
import math
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict

from mpar.checkpoint._shard_file import DTYPES, Box
from mpar.errors import CheckpointError

__all__ = ["INDEX_NAME", "VERSION", "Entry", "Index", "Shard", "join_entries", "read_index", "write_index"]

INDEX_NAME = "index.json"
VERSION = 1


@dataclass(frozen=True)
class Shard:
    """A block of a tensor: the file and key of its bytes, its place in the tensor, and the CRC-32 of its bytes."""

    file: str
    key: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    crc32: int

    @property
    def box(self) -> Box:
        """The block's place in the tensor."""
        return tuple(zip(self.offsets, self.shape, strict=True))


@dataclass(frozen=True)
class Entry:
    """A tensor: its global shape, the name of its dtype, and shards that together cover it exactly once."""

    shape: tuple[int, ...]
    dtype: str
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Index:
    """The content of `index.json`. `files` has the size in bytes of every other file of the checkpoint."""

    step: int
    mesh: Mapping[str, int]
    files: Mapping[str, int]
    tensors: Mapping[str, Entry]


class ShardJson(TypedDict):
    """A Shard in `index.json`."""

    file: str
    key: str
    offsets: list[int]
    shape: list[int]
    crc32: int


class EntryJson(TypedDict):
    """An Entry in `index.json`. Whether a file really has these fields is checked while it is read."""

    shape: list[int]
    dtype: str
    shards: list[ShardJson]


def entry_from_json(raw: EntryJson) -> Entry:
    """The inverse of `dataclasses.asdict` and JSON. Raises KeyError, TypeError or ValueError if `raw` is no entry."""
    shards = tuple(
        Shard(str(s["file"]), str(s["key"]), tuple(map(int, s["offsets"])), tuple(map(int, s["shape"])), int(s["crc32"]))
        for s in raw["shards"]
    )
    if raw["dtype"] not in DTYPES:
        raise ValueError(f"dtype {raw['dtype']!r} is unknown")
    return Entry(tuple(map(int, raw["shape"])), raw["dtype"], shards)


def join_entries(parts: list[dict[str, Entry]]) -> tuple[dict[str, Entry], list[str]]:
    """(the entries of all ranks put together, the problems found, one line each).

    If several ranks hold the same block, because a tensor is on more than one stage, the block of the first is taken; the bytes
    of all must be equal. The shards of an entry must be equal blocks of a grid that covers the tensor.
    """
    problems: list[str] = []
    joined: dict[str, Entry] = {}
    for part in parts:
        for path, entry in part.items():
            old = joined.setdefault(path, Entry(entry.shape, entry.dtype, ()))
            if (old.shape, old.dtype) != (entry.shape, entry.dtype):
                problems.append(f"{path} is {old.dtype} {old.shape} on one rank, {entry.dtype} {entry.shape} on another")
                continue
            by_place = {(shard.offsets, shard.shape): shard for shard in old.shards}
            for shard in entry.shards:
                first = by_place.setdefault((shard.offsets, shard.shape), shard)
                if first.crc32 != shard.crc32:
                    problems.append(f"{path} at {shard.offsets} is held by several stages, with different values")
            joined[path] = Entry(entry.shape, entry.dtype, tuple(by_place.values()))
    problems += [f"{path} {e.shape}: {problem}" for path, e in sorted(joined.items()) if (problem := _cover_problem(e))]
    return dict(sorted(joined.items())), problems


def write_index(folder: Path, index: Index) -> None:
    """Write `index.json` into `folder`."""
    body = {"version": VERSION, **asdict(index)}
    text = json.dumps({"crc32": zlib.crc32(_canonical(body)), "index": body}, indent=1)
    (folder / INDEX_NAME).write_text(text, encoding="utf-8")


def read_index(folder: Path) -> Index:
    """Read `index.json`. Raises CheckpointError if there is none, if it is damaged, or if a newer version wrote it."""
    file = folder / INDEX_NAME
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"cannot read the checkpoint {folder}: it has no {INDEX_NAME} ({error.strerror}).\n"
            "Pass one checkpoint's own folder (latest(folder) gives the newest); one without an index was never finished."
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{file}: is not JSON ({error}); it is damaged. Use another checkpoint.") from error
    try:
        body = raw["index"]
        if raw["crc32"] != zlib.crc32(_canonical(body)):
            raise CheckpointError(f"{file}: does not fit its own checksum; it is damaged. Use another checkpoint.")
        if body["version"] != VERSION:
            raise CheckpointError(f"{file}: has format version {body['version']}, this code reads version {VERSION}.")
        tensors = {str(path): entry_from_json(entry) for path, entry in body["tensors"].items()}
        return Index(int(body["step"]), dict(body["mesh"]), dict(body["files"]), tensors)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file}: is not the index of a checkpoint ({error!r}).") from error


def file_problems(folder: Path, index: Index) -> list[str]:
    """A line for every file that is missing or does not have the size that the index says."""
    problems = []
    for name, size in index.files.items():
        file = folder / name
        if not file.is_file():
            problems.append(f"{file}: is missing")
        elif file.stat().st_size != size:
            problems.append(f"{file}: has {file.stat().st_size} bytes, the index says {size}; it is truncated or damaged")
    return problems


def _cover_problem(entry: Entry) -> str | None:
    blocks = Counter(shard.shape for shard in entry.shards)
    if len(blocks) != 1:
        return f"has shards of different shapes, {sorted(blocks)}"
    (block,) = blocks
    sizes = [max(size, 1) for size in block]
    expected = math.prod(size // one if size else 1 for size, one in zip(entry.shape, sizes, strict=True))
    aligned = all(offset % size == 0 for shard in entry.shards for offset, size in zip(shard.offsets, sizes, strict=True))
    if not aligned or len({shard.offsets for shard in entry.shards}) != len(entry.shards) or len(entry.shards) != expected:
        return f"{len(entry.shards)} shards of shape {block} do not cover it: {expected} were expected. Is a rank's part missing?"
    return None


def _canonical(body: object) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
