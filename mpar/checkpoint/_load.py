"""Loading: any mesh can read any checkpoint. A rank reads only the bytes of its own blocks, from whichever files hold them."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from mpar.checkpoint._index import Index, Shard, file_problems, read_index
from mpar.checkpoint._shard_file import DTYPES, Box, ShardFile, checksum, dtype_name
from mpar.checkpoint._state import read_extras
from mpar.errors import CheckpointError
from mpar.mesh import Mesh
from mpar.spec import P, check_spec, local_shape

__all__ = ["load", "names", "verify"]

Wanted = Mapping[str, tuple[tuple[int, ...], P, torch.dtype]]


def load(path: str | Path, wanted: Wanted, mesh: Mesh, rank: int, *, elsewhere: Collection[str] | None = ()) -> dict[str, Tensor]:
    """This rank's shards of the tensors in `wanted`, on the CPU.

    path:       the folder of one checkpoint; it may have been saved from any mesh.
    wanted:     for each path in the tree: (global shape, spec on `mesh`, dtype).
    elsewhere:  other names that the checkpoint may hold, such as those of other stages. None allows all names.

    Only the bytes of this rank's blocks are read. A shard of which every byte is read is checked against its CRC-32; for others
    only the size and the header of the file are checked (`verify` reads and checks everything).
    Raises CheckpointError, which lists all names that are missing, unexpected or of another shape or dtype, or all damaged files.
    """
    path = Path(path)
    index = read_index(path)
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
    out: dict[str, Tensor] = {}
    reads: dict[str, list[tuple[str, Shard, Box]]] = defaultdict(list)
    boxes: dict[str, Box] = {}
    for name, (shape, spec, dtype) in wanted.items():
        local = local_shape(tuple(shape), spec, mesh)
        boxes[name] = tuple((mesh.index(rank, spec.dim(dim)) * size, size) for dim, size in enumerate(local))
        out[name] = torch.empty(local, dtype=dtype)
        for shard in index.tensors[name].shards:
            common = _intersection(boxes[name], shard.box)
            if common is not None:
                reads[shard.file].append((name, shard, common))
    files = {name: size for name, size in index.files.items() if name in reads}
    damaged = file_problems(path, Index(index.step, index.mesh, files, {}))
    for file in sorted(reads) if not damaged else ():
        damaged += _read_blocks(path / file, reads[file], boxes, out)
    if damaged:
        raise _damaged(path, damaged)
    return out


def names(path: str | Path) -> list[str]:
    """The logical names of all tensors in a checkpoint. Raises CheckpointError."""
    return list(read_index(Path(path)).tensors)


def verify(path: str | Path) -> None:
    """Read all of a checkpoint and compare every checksum. Raises CheckpointError, which lists all damaged files."""
    path = Path(path)
    index = read_index(path)
    read_extras(path)
    damaged = file_problems(path, index)
    reads: dict[str, list[tuple[str, Shard]]] = defaultdict(list)
    for name, entry in index.tensors.items():
        for shard in entry.shards:
            reads[shard.file].append((name, shard))
    for file, shards in sorted(reads.items()) if not damaged else ():
        for name, shard in shards:
            box, out = shard.box, {name: torch.empty(shard.shape, dtype=DTYPES[index.tensors[name].dtype][0])}
            damaged += _read_blocks(path / file, [(name, shard, box)], {name: box}, out)
    if damaged:
        raise _damaged(path, damaged)


def _read_blocks(file: Path, blocks: list[tuple[str, Shard, Box]], boxes: Mapping[str, Box], out: dict[str, Tensor]) -> list[str]:
    """Fill the parts of `out` that `file` holds. Returns the problems of the file, one line each."""
    problems = []
    try:
        with ShardFile(file) as source:
            for name, shard, common in blocks:
                inside = tuple((first - start, size) for (first, size), start in zip(common, shard.offsets, strict=True))
                block = source.read(shard.key, shard.shape, out[name].dtype, inside)
                if common == shard.box and checksum(block) != shard.crc32:
                    problems.append(f"{file}: the bytes of {shard.key!r} do not fit their checksum; the file is damaged")
                elif common == boxes[name]:
                    out[name] = block
                else:
                    place = tuple(
                        slice(first - start, first - start + size)
                        for (first, size), (start, _) in zip(common, boxes[name], strict=True)
                    )
                    out[name][place] = block
    except CheckpointError as error:
        problems.append(str(error))
    except OSError as error:
        problems.append(f"{file}: cannot be read ({error.strerror})")
    return problems


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


def _intersection(one: Box, other: Box) -> Box | None:
    """The block that two blocks have in common; None if they do not overlap."""
    common = []
    for (start, size), (other_start, other_size) in zip(one, other, strict=True):
        first, end = max(start, other_start), min(start + size, other_start + other_size)
        if first >= end:
            return None
        common.append((first, end - first))
    return tuple(common)


def _damaged(path: Path, problems: list[str]) -> CheckpointError:
    return CheckpointError(
        f"cannot read the checkpoint {path}:\n  " + "\n  ".join(problems) + "\nUse an older one: available(folder) lists them."
    )
