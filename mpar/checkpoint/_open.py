"""Opens a checkpoint of any format version: its index, the files of its ranks."""

from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

from mpar.checkpoint._index import INDEX_NAME, Index, parse_index, read_raw_index
from mpar.checkpoint._layout import file_name
from mpar.checkpoint._shard_file import ShardFile
from mpar.checkpoint._version1 import Version1File, parse_index_1
from mpar.errors import CheckpointError

__all__ = ["OpenShards", "file_problems", "open_shards", "read_index"]

OpenShards: TypeAlias = ShardFile | Version1File
"""The open file of one rank."""


def read_index(folder: Path) -> Index:
    """The index of a checkpoint. Raises CheckpointError if there is none, if it is damaged, or if a newer version wrote it."""
    version, content, raw = read_raw_index(folder)
    file = folder / INDEX_NAME
    return parse_index_1(file, raw) if version == 1 else parse_index(file, content, raw)


def open_shards(folder: Path, index: Index, rank: int) -> OpenShards:
    """The file of `rank`, of which size and header were checked. Raises CheckpointError."""
    file, held = folder / file_name(rank), index.by_rank[rank]
    return Version1File(file, index.size_of_file(rank), held) if index.version == 1 else ShardFile(file, index.layout(rank), held)


def file_problems(folder: Path, index: Index, ranks: Iterable[int]) -> list[str]:
    """A line for the file of each of `ranks` that is missing, not regular, or has not the size or the header that it should."""
    problems = []
    for rank in ranks:
        try:
            open_shards(folder, index, rank).close()
        except CheckpointError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{folder / file_name(rank)}: cannot be read ({error.strerror})")
    return problems
