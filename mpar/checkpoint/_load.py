"""Loading: any mesh can read any checkpoint. A rank reads what holds its part of every tensor, from whichever files have it."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mpar.checkpoint._index import Index, NewerVersionError
from mpar.checkpoint._layout import DTYPES, Box, dtype_name, file_name
from mpar.checkpoint._open import OpenShards, file_problems, open_shards, read_index
from mpar.checkpoint._reader import intersection, relative, span
from mpar.checkpoint._slabs import boxes
from mpar.checkpoint._state import read_state
from mpar.errors import CheckpointError
from mpar.mesh import Mesh
from mpar.spec import P, check_spec, local_shape

__all__ = ["all_damage", "load", "names", "verify"]

Wanted = Mapping[str, tuple[tuple[int, ...], P, torch.dtype]]


def load(path: str | Path, wanted: Wanted, mesh: Mesh, rank: int, *, elsewhere: Collection[str] | None = ()) -> dict[str, Tensor]:
    """This rank's shards of the tensors in `wanted`, on the CPU.

    path:       the folder of one checkpoint; it may have been saved from any mesh.
    wanted:     for each path in the tree: (global shape, spec on `mesh`, dtype).
    elsewhere:  other names that the checkpoint may hold, such as those of other stages. None allows all names.

    Every byte that this rank gets was compared with a checksum: it reads the blocks of 128 KiB that overlap its part of a shard,
    each once and whole. Blocks that it does not want are not read, so damage in them is found by the rank that does.
    Raises CheckpointError, which lists all names that are missing, unexpected or of another shape or dtype, or all damaged files.
    """
    path = Path(path)
    index = read_index(path)
    read_state(path, index)
    problems = _name_problems(index, wanted, mesh, elsewhere)
    if not 0 <= rank < mesh.size:
        problems.append(f"rank {rank} is not on {mesh}, which has {mesh.size} ranks")
    if problems:
        raise CheckpointError(
            f"cannot load {path} (step {index.step}, saved from {Mesh(**index.mesh)}):\n  "
            + "\n  ".join(problems)
            + "\nLoad it into the model that it was saved from, made with the same options; ask for the saved dtype and convert "
            "afterwards. In Python, `elsewhere` can name tensors to leave out."
        )
    reads = _planned_reads(index, wanted, mesh, rank)
    damaged = file_problems(path, index, reads)
    if damaged:  # before memory is taken for what these files do not hold
        raise _damaged(path, damaged)
    out = {name: torch.empty(local_shape(tuple(shape), spec, mesh), dtype=dtype) for name, (shape, spec, dtype) in wanted.items()}
    for source in sorted(reads):
        damaged += _read_blocks(path, index, source, reads[source], out)
    if damaged:
        raise _damaged(path, damaged)
    return out


def names(path: str | Path) -> list[str]:
    """The logical names of all tensors in a checkpoint. Raises CheckpointError."""
    return list(read_index(Path(path)).tensors)


def verify(path: str | Path, on_bytes: Callable[[int], None] = lambda _: None) -> None:
    """Read all of a checkpoint and compare every checksum. Raises CheckpointError, which lists all damaged files.

    on_bytes: is told how many bytes of tensors were read since it was called last.
    """
    damaged = all_damage(Path(path), on_bytes)
    if damaged:
        raise _damaged(Path(path), damaged)


def all_damage(path: Path, on_bytes: Callable[[int], None] = lambda _: None) -> list[str]:
    """Read all of the checkpoint at `path`. A line, or several, for everything that is wrong with it.

    Raises NewerVersionError if this code cannot tell.
    """
    try:
        index = read_index(path)
        read_state(path, index)
    except NewerVersionError:
        raise
    except CheckpointError as error:
        return [str(error)]
    return [line for rank in index.by_rank for line in _file_damage(path, index, rank, on_bytes)]


def _file_damage(path: Path, index: Index, rank: int, on_bytes: Callable[[int], None]) -> list[str]:
    """Read the whole file of `rank`. A line for each shard that does not fit its checksums."""

    def check(name: str, file: OpenShards) -> None:
        shard = index.by_rank[rank][name].shard
        dtype = DTYPES[shard.dtype][0]
        for box in boxes(shard.shape, dtype.itemsize):
            block = torch.empty([size for _, size in box], dtype=dtype)
            file.read(name, box, block)
            on_bytes(block.nbytes)

    return _problems_in(path, index, rank, [partial(check, name) for name in index.by_rank[rank]])


def _problems_in(path: Path, index: Index, rank: int, reads: Sequence[Callable[[OpenShards], None]]) -> list[str]:
    """Do these reads from the file of `rank`. A line for each that fails, or one if the file as a whole cannot be read."""
    problems = []
    try:
        with open_shards(path, index, rank) as file:
            for read in reads:
                try:
                    read(file)
                except CheckpointError as error:
                    problems.append(str(error))
    except CheckpointError as error:
        problems.append(str(error))
    except OSError as error:
        problems.append(f"{path / file_name(rank)}: cannot be read ({error.strerror})")
    return problems


@dataclass(frozen=True)
class _Read:
    """What is read from one shard: its box in the shard, and its place in this rank's part of the tensor."""

    name: str
    box: Box
    place: tuple[slice, ...]


def _planned_reads(index: Index, wanted: Wanted, mesh: Mesh, rank: int) -> dict[int, list[_Read]]:
    """What `rank` reads, by the rank whose file has it."""
    reads: dict[int, list[_Read]] = defaultdict(list)
    for name, (shape, spec, _) in wanted.items():
        local = local_shape(tuple(shape), spec, mesh)
        own = tuple((mesh.index(rank, spec.dim(dim)) * size, size) for dim, size in enumerate(local))
        for source, written in index.tensors[name].written():
            common = intersection(own, written.shard.box)
            if common is not None:
                inside = relative(common, written.shard.offsets)
                place = tuple(map(span, relative(common, tuple(first for first, _ in own))))
                reads[source].append(_Read(name, inside, place))
    return reads


def _read_blocks(path: Path, index: Index, source: int, reads: list[_Read], out: Mapping[str, Tensor]) -> list[str]:
    """Fill the parts of `out` that the file of rank `source` holds. Returns the problems of the file, one line each."""

    def fill(read: _Read, file: OpenShards) -> None:
        file.read(read.name, read.box, out[read.name][read.place])

    return _problems_in(path, index, source, [partial(fill, read) for read in reads])


def _name_problems(index: Index, wanted: Wanted, mesh: Mesh, elsewhere: Collection[str] | None) -> list[str]:
    problems = [f"missing: {name} {tuple(shape)}" for name, (shape, _, _) in wanted.items() if name not in index.tensors]
    if elsewhere is not None:
        known = set(wanted) | set(elsewhere)
        problems += [f"unexpected: {name} {entry.shape}" for name, entry in index.tensors.items() if name not in known]
    for name, (shape, spec, dtype) in wanted.items():
        entry = index.tensors.get(name)
        if entry is not None and (entry.shape, entry.dtype) != (tuple(shape), dtype_name(dtype)):
            saved = f"{entry.dtype} {entry.shape}"
            problems.append(f"different: {name} is {saved} in the checkpoint, {dtype_name(dtype)} {tuple(shape)} is wanted")
        spec_problems = check_spec(name, tuple(shape), spec, mesh)
        if not spec_problems and spec.partial:
            spec_problems = [f"{name} by {spec}: a pending sum cannot be loaded; ask for the value"]
        problems += spec_problems
    return problems


def _damaged(path: Path, problems: list[str]) -> CheckpointError:
    return CheckpointError(
        f"cannot read the checkpoint {path}:\n  "
        + "\n  ".join(problems)
        + "\nIf a run should go on from it: start it with checkpoint.on_damaged=move_aside, which renames it to "
        f"{path.name}.damaged and goes on from the one before (in Python: checkpoint.move_damaged_aside), or give the folder of "
        "another one, which checkpoint.available lists, as resume=, and a new run_dir."
    )
