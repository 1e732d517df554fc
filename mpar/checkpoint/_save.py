"""Saving: every rank writes its shards, then rank 0 writes the index and renames the folder, which makes the checkpoint."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from mpar.checkpoint._folders import checkpoint_name, partial_name, prune
from mpar.checkpoint._index import INDEX_NAME, Entry, Index, Shard, entry_from_json, join_entries, write_index
from mpar.checkpoint._shard_file import DTYPES, checksum, dtype_name, sync, write_shards
from mpar.checkpoint._state import STATE_NAME, Json, json_problems, write_state
from mpar.errors import CheckpointError
from mpar.mesh import Mesh
from mpar.spec import P, check_spec, local_shape

__all__ = ["save"]


def save(
    folder: str | Path,
    step: int,
    tensors: Mapping[str, Tensor],
    specs: Mapping[str, P],
    mesh: Mesh,
    rank: int,
    shapes: Mapping[str, tuple[int, ...]],
    extras: Mapping[str, Json],
    barrier: Callable[[], None],
    *,
    keep: int | None = None,
    stage_axes: tuple[str, ...] = ("pp",),
) -> Path:
    """Write the checkpoint of `step` into `folder`, on all ranks of `mesh` together; returns its path.

    tensors:     for each path this rank's shard, on any device.
    specs, shapes:  for the same paths the spec and the global shape of the tensor.
    extras:      step, data position, seed, config, as JSON values; those of rank 0 are written.
    barrier:     a function that returns once every rank has called it. Every rank calls it three times, even if it has failed.
    keep:        if given, delete all complete checkpoints except those of the `keep` highest steps and this one.
    stage_axes:  mesh axes along which ranks hold different tensors. Along all other axes, ranks that hold the same shard
                 are replicas, and only the first of them writes it.

    The files are written into `.step_X.partial`, which is renamed to `step_X` when all of it is on the disk.
    Raises CheckpointError on every rank if any rank failed; then there is no new checkpoint, and none was deleted.
    """
    folder = Path(folder)
    partial, final = folder / partial_name(step), folder / checkpoint_name(step)
    failure = _attempt(lambda: _prepare(partial, final, step, rank, mesh, tensors, specs, shapes, extras, keep))
    prepared = failure is None
    barrier()
    failure = failure or _attempt(lambda: _write_rank(partial, tensors, specs, mesh, rank, shapes, stage_axes))
    if failure is not None and partial.is_dir():  # tell rank 0 why; if even that fails, rank 0 sees that the report is missing
        _attempt(lambda: _part_file(partial, rank).write_text(json.dumps({"error": str(failure)}), encoding="utf-8"))
    barrier()
    if rank == 0 and prepared:  # even if rank 0 has failed itself, so that the failures of all ranks are listed
        failure = _attempt(lambda: _finish(partial, final, step, mesh, extras))
    barrier()
    if failure is None and not (final / INDEX_NAME).is_file():
        failure = CheckpointError(f"cannot save {final}: another rank failed, see its error. Older checkpoints are as before.")
    if failure is not None:
        raise failure
    if rank == 0 and keep is not None:
        prune(folder, keep=keep, new=final)
    return final


def _attempt(action: Callable[[], object]) -> CheckpointError | None:
    """Run `action` and return its error, if any. If a rank raised it at once, the others would wait for it in the barrier."""
    try:
        action()
    except CheckpointError as error:
        return error
    except Exception as error:
        wrapped = CheckpointError(f"cannot save a checkpoint: {type(error).__name__}: {error}")
        wrapped.__cause__ = error
        return wrapped
    return None


def _prepare(
    partial: Path,
    final: Path,
    step: int,
    rank: int,
    mesh: Mesh,
    tensors: Mapping[str, Tensor],
    specs: Mapping[str, P],
    shapes: Mapping[str, tuple[int, ...]],
    extras: Mapping[str, Json],
    keep: int | None,
) -> None:
    """Check all arguments of this rank. Rank 0 also makes the folder."""
    problems = [f"step must be a non-negative int, not {step!r}"] if not isinstance(step, int) or step < 0 else []
    if keep is not None and keep < 1:
        problems.append(f"keep must be at least 1, not {keep}; None keeps all")
    if final.exists():
        problems.append(f"{final} exists. Move it away, or save into another folder; nothing is overwritten")
    for path in sorted(set(tensors) | set(specs) | set(shapes)):
        absent = [name for name, given in (("tensors", tensors), ("specs", specs), ("shapes", shapes)) if path not in given]
        if absent:
            problems.append(f"{path}: is not in {' nor in '.join(absent)}")
        else:
            problems += _tensor_problems(path, tensors[path], specs[path], tuple(shapes[path]), mesh)
    problems += json_problems(extras)
    if extras.get("step", step) != step:
        problems.append(f"extras.step is {extras['step']}, the step is {step}")
    if not 0 <= rank < mesh.size:
        problems.append(f"rank {rank} is not on {mesh}, which has {mesh.size} ranks")
    if problems:
        raise CheckpointError(f"cannot save {final} on rank {rank} of {mesh}:\n  " + "\n  ".join(problems))
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)


def _tensor_problems(path: str, tensor: Tensor, spec: P, shape: tuple[int, ...], mesh: Mesh) -> list[str]:
    problems = check_spec(path, shape, spec, mesh)
    if not problems and spec.partial:
        problems.append(f"{path} by {spec}: is a pending sum over {spec.partial}; reduce it first")
    if not problems and tuple(tensor.shape) != local_shape(shape, spec, mesh):
        expected = local_shape(shape, spec, mesh)
        problems.append(f"{path}: the local shape is {tuple(tensor.shape)}, but {shape} by {spec} gives {expected}")
    if dtype_name(tensor.dtype) not in DTYPES:
        problems.append(f"{path}: dtype {tensor.dtype} cannot be saved; use one of {', '.join(DTYPES)}")
    return problems


def _write_rank(
    partial: Path,
    tensors: Mapping[str, Tensor],
    specs: Mapping[str, P],
    mesh: Mesh,
    rank: int,
    shapes: Mapping[str, tuple[int, ...]],
    stage_axes: tuple[str, ...],
) -> None:
    """Write the file of this rank's shards, and a report from which rank 0 makes the index."""
    if not partial.is_dir():
        raise CheckpointError(f"{partial} does not exist: rank 0 could not make it, or the ranks do not share a file system")
    name = f"rank-{rank:05d}.safetensors"
    shards: dict[str, Tensor] = {}
    entries: dict[str, Entry] = {}
    for path in sorted(tensors):
        spec, shape = specs[path], tuple(shapes[path])
        replicated = tuple(axis for axis in mesh.axes if axis not in spec.axes and axis not in stage_axes)
        if mesh.index(rank, replicated) != 0:
            continue
        shard = tensors[path].detach().cpu().contiguous()
        offsets = tuple(mesh.index(rank, spec.dim(dim)) * size for dim, size in enumerate(shard.shape))
        shards[path] = shard
        entries[path] = Entry(shape, dtype_name(shard.dtype), (Shard(name, path, offsets, tuple(shard.shape), checksum(shard)),))
    if shards:
        write_shards(partial / name, shards)
    part = {"tensors": {path: asdict(entry) for path, entry in entries.items()}}
    _part_file(partial, rank).write_text(json.dumps(part), encoding="utf-8")


def _finish(partial: Path, final: Path, step: int, mesh: Mesh, extras: Mapping[str, Json]) -> None:
    """Join the reports of all ranks into the index, write it, and rename the folder."""
    parts, problems = [], []
    for rank in range(mesh.size):
        try:
            part = json.loads(_part_file(partial, rank).read_text(encoding="utf-8"))
        except OSError as error:
            part = {"error": f"left no report ({error.strerror}); is the folder on a file system that all ranks share?"}
        if "error" in part:
            problems.append(f"rank {rank}: {part['error']}")
        else:
            parts.append({path: entry_from_json(entry) for path, entry in part["tensors"].items()})
    tensors, entry_problems = join_entries(parts) if not problems else ({}, [])
    if problems or entry_problems:
        raise CheckpointError(f"cannot save {final} from {mesh}:\n  " + "\n  ".join(problems + entry_problems))
    write_state(partial, step, extras)
    for rank in range(mesh.size):
        _part_file(partial, rank).unlink()
    used = sorted({shard.file for entry in tensors.values() for shard in entry.shards})
    files = {name: (partial / name).stat().st_size for name in [*used, STATE_NAME]}
    write_index(partial, Index(step, mesh.sizes, files, tensors))
    sync(partial / STATE_NAME)
    sync(partial / INDEX_NAME)
    sync(partial)
    partial.rename(final)
    sync(final.parent)


def _part_file(partial: Path, rank: int) -> Path:
    return partial / f"rank-{rank:05d}.json"
