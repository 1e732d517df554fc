"""Saver: saves the state of a rank again and again. A save copies the shards; a thread writes them while training goes on."""

import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mpar.checkpoint._attempt import Attempt, Failure
from mpar.checkpoint._digest import digest
from mpar.checkpoint._disk import confirm_names, remove_folder, sync, write_file
from mpar.checkpoint._files import is_name
from mpar.checkpoint._folders import prune, remains
from mpar.checkpoint._index import INDEX_NAME, Index, Written, index_text, join_entries
from mpar.checkpoint._keep import Keep
from mpar.checkpoint._layout import DTYPES, Shard, dtype_name, layout
from mpar.checkpoint._staging import Staging
from mpar.checkpoint._state import STATE_NAME, Json, json_problems, state_text
from mpar.checkpoint._write import write_shards
from mpar.errors import CheckpointError, NumericsError
from mpar.mesh import Mesh
from mpar.spec import P, check_spec, local_shape

__all__ = ["Leaf", "SaveOptions", "Saver"]

Leaf = tuple[tuple[int, ...], P, torch.dtype]
"""A tensor of the state: its global shape, its spec, its dtype."""


@dataclass(frozen=True)
class SaveOptions:
    """How checkpoints are saved.

    run:         a name that all ranks of this run share and no other run has had; one rank needs none.
    keep:        which checkpoints are deleted after a save; None: none.
    timeout_s:   for so long nothing may be written before a rank that waits for others says that they are missing.
    finite:      refuse to save a value that is not finite.
    stage_axes:  mesh axes along which ranks hold different tensors. Along all other axes, ranks that hold the same shard
                 are replicas, and only the first of them writes it.
    """

    run: str = "alone"
    keep: Keep | None = None
    timeout_s: float = 600.0
    finite: bool = True
    stage_axes: tuple[str, ...] = ("pp",)


class Saver:
    """Saves the shards of one rank into checkpoints in `folder`; all ranks of `mesh` make the same calls.

    leaves:      the tensors of which this rank has shards, by their names.
    device:      where the tensors are.
    problems:    what the caller found wrong on this rank: saving fails with these lines, on all ranks.

    At most one save is under way. Its memory is one copy of the shards that this rank writes, which is kept from save to save.
    Ranks need no collectives to agree: they see each other's files. Nothing else may save into the folder at the same time.
    """

    def __init__(
        self,
        folder: str | Path,
        leaves: Mapping[str, Leaf],
        mesh: Mesh,
        rank: int,
        options: SaveOptions | None = None,
        *,
        device: torch.device | None = None,
        problems: Sequence[str] = (),
    ) -> None:
        self._folder, self._mesh, self._rank, self._options = Path(folder), mesh, rank, options or SaveOptions()
        self._leaves = {path: (tuple(shape), spec, dtype) for path, (shape, spec, dtype) in sorted(leaves.items())}
        self._problems = [*problems, *_leaf_problems(self._leaves, mesh, rank)]
        self._shards = {} if self._problems else _shards(self._leaves, mesh, rank, self._options.stage_axes)
        self._staging = Staging(self._shards, layout(0, mesh.sizes, rank, self._shards), device or torch.device("cpu"))
        self._saves: list[int] = []
        self._thread: threading.Thread | None = None
        self._failure: Failure | None = None
        self._path: Path | None = None

    def begin(self, step: int, tensors: Mapping[str, Tensor], extras: Mapping[str, Json]) -> float:
        """Copy this rank's shards of `step` and start to write them; afterwards the tensors may be overwritten.

        extras: JSON values; those of rank 0 are written. Returns for how many seconds it waited for the save before this one.
        Raises the failure of the save before, or CheckpointError if the arguments are wrong: then the other ranks fail, too.
        """
        began = time.perf_counter()
        self.wait()
        waited_s = time.perf_counter() - began
        self._saves.append(step)
        options = self._options
        attempt = Attempt(self._folder, step, f"{options.run}-{len(self._saves)}", self._mesh.size, options.timeout_s)
        failure = _failure_of(lambda: self._copy(attempt, tensors, extras))
        target = threading.Thread(target=self._write, args=(attempt, dict(extras), failure), name=f"save {step}", daemon=True)
        self._thread = target
        target.start()
        if failure is not None:
            self.wait()
        return waited_s

    @property
    def step(self) -> int | None:
        """The step of the last save that began."""
        return self._saves[-1] if self._saves else None

    @property
    def under_way(self) -> bool:
        """Whether a save is being written."""
        return self._thread is not None and self._thread.is_alive()

    def check(self) -> None:
        """Raise the failure of a save that has ended; returns at once."""
        if not self.under_way:
            self.wait()

    def wait(self, limit_s: float | None = None) -> Path | None:
        """Wait until the save under way, if any, has ended; returns the path of the last checkpoint that this saver made.

        Raises what went wrong: CheckpointError, or NumericsError if a value was not finite. Then there is no new checkpoint, and
        none was deleted. With `limit_s`, returns after so many seconds even if the save goes on.
        """
        if self._thread is not None:
            self._thread.join(limit_s)
            if self._thread.is_alive():
                return self._path
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return self._path

    def _copy(self, attempt: Attempt, tensors: Mapping[str, Tensor], extras: Mapping[str, Json]) -> None:
        problems = self._wrong_arguments(attempt, tensors, extras)
        if problems:
            raise CheckpointError("\n    ".join(problems))
        self._staging.copy(tensors)

    def _wrong_arguments(self, attempt: Attempt, tensors: Mapping[str, Tensor], extras: Mapping[str, Json]) -> list[str]:
        step, problems = attempt.step, list(self._problems)
        if step < 0:
            problems.append(f"step must not be negative, and is {step}")
        elif attempt.final.exists():
            problems.append(f"{attempt.final} exists. Move it away, or save into another folder; nothing is overwritten")
        problems += [] if self._options.keep is None else self._options.keep.problems()
        if self._mesh.size > 1 and self._options.run == "alone":
            problems.append(f"{self._mesh.size} ranks need the name of a run that they share and no other run has had")
        for path in sorted(set(tensors) | set(self._leaves)):
            if path not in tensors or path not in self._leaves:
                problems.append(f"{path}: is not in {'tensors' if path not in tensors else 'the leaves of this saver'}")
            elif not self._problems:
                problems += _tensor_problems(path, tensors[path], self._leaves[path], self._mesh)
        problems += json_problems(extras)
        if extras.get("step", step) != step:
            problems.append(f"extras.step is {extras['step']}, the step is {step}")
        return problems

    def _write(self, attempt: Attempt, extras: Mapping[str, Json], failure: Failure | None) -> None:
        """In a thread: write this rank's part, unless it has failed already, and see what becomes of the attempt."""
        failure = failure or _failure_of(lambda: self._write_part(attempt))
        if failure is not None:
            attempt.report_failure(self._rank, failure)
        if self._rank == 0:  # even if it has failed itself, so that the failures of all ranks are listed
            own = failure
            failure = _failure_of(lambda: self._publish(attempt, extras, own))
            if failure is not None:
                attempt.give_up(failure)
                if self._mesh.size == 1:  # nobody else has to read why
                    remove_folder(attempt.failed)
        elif failure is None:
            failure = _failure_of(attempt.await_outcome)
        else:
            failure = attempt.failure({self._rank: failure})
        self._failure = failure
        if failure is None:
            self._path = attempt.final

    def _write_part(self, attempt: Attempt) -> None:
        if self._rank == 0:  # first, because they may be what fills the disk
            for folder in remains(self._folder, self._options.run, len(self._saves)):
                remove_folder(folder)
        attempt.make()
        checksums = {}
        if self._shards:
            planned = layout(attempt.step, self._mesh.sizes, self._rank, self._shards)
            file = attempt.shards_file(self._rank)
            checksums = write_shards(file, planned, self._shards, self._staging, finite=self._options.finite)
        attempt.report(self._rank, {path: Written(shard, checksums[path]) for path, shard in self._shards.items()})

    def _publish(self, attempt: Attempt, extras: Mapping[str, Json], own: Failure | None) -> None:
        """On rank 0: join the reports of all ranks into the index, write it, rename the folder, and delete what is not kept."""
        tensors, problems = join_entries(dict(enumerate(attempt.collect(own))))
        if problems:
            raise attempt.failure({}, problems)
        partial = attempt.partial
        for rank in range(self._mesh.size):
            attempt.report_file(rank).unlink()
        state = state_text(attempt.step, extras).encode()
        index = Index(attempt.step, self._mesh.sizes, len(state), digest(state).hex(), tensors)
        write_file(partial / STATE_NAME, [state])
        write_file(partial / INDEX_NAME, [index_text(index).encode()])
        sync(partial)
        if len(self._saves) == 1:
            confirm_names(self._folder)
        partial.rename(attempt.final)
        try:
            sync(self._folder)
        except OSError as error:
            raise CheckpointError(f"{attempt.final} is written, but the disk does not confirm it: {error}") from error
        if self._options.keep is not None:
            try:
                prune(self._folder, self._options.keep, attempt.final)
            except (OSError, CheckpointError) as error:  # the new checkpoint exists, and training can go on
                warnings.warn(f"cannot delete old checkpoints in {self._folder}: {error}", stacklevel=2)


def _shards(leaves: Mapping[str, Leaf], mesh: Mesh, rank: int, stage_axes: tuple[str, ...]) -> dict[str, Shard]:
    """The shards that this rank writes."""
    shards = {}
    for path, (shape, spec, dtype) in leaves.items():
        replicated = tuple(axis for axis in mesh.axes if axis not in spec.axes and axis not in stage_axes)
        if mesh.index(rank, replicated) == 0:
            local = local_shape(shape, spec, mesh)
            offsets = tuple(mesh.index(rank, spec.dim(dim)) * size for dim, size in enumerate(local))
            shards[path] = Shard(shape, dtype_name(dtype), offsets, local)
    return shards


def _failure_of(action: Callable[[], object]) -> Failure | None:
    """Run `action` and return what it raised, if anything, as an error that other ranks can be told."""
    try:
        action()
    except (CheckpointError, NumericsError) as error:
        return error
    except Exception as error:
        failure = CheckpointError(f"{type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure
    return None


def _leaf_problems(leaves: Mapping[str, Leaf], mesh: Mesh, rank: int) -> list[str]:
    problems = [] if 0 <= rank < mesh.size else [f"rank {rank} is not on {mesh}, which has {mesh.size} ranks"]
    for path, (shape, spec, dtype) in leaves.items():
        problems += check_spec(path, shape, spec, mesh)
        if spec.partial:
            problems.append(f"{path} by {spec}: is a pending sum over {spec.partial}; reduce it first")
        if not is_name(path):
            problems.append(f"{path!r} cannot name a tensor: names are not empty and do not begin with __")
        if dtype_name(dtype) not in DTYPES:
            problems.append(f"{path}: dtype {dtype} cannot be saved; use one of {', '.join(DTYPES)}")
    return problems


def _tensor_problems(path: str, tensor: Tensor, leaf: Leaf, mesh: Mesh) -> list[str]:
    shape, spec, dtype = leaf
    expected = local_shape(shape, spec, mesh)
    if tuple(tensor.shape) != expected:
        return [f"{path}: the local shape is {tuple(tensor.shape)}, but {shape} by {spec} gives {expected}"]
    return [] if tensor.dtype == dtype else [f"{path}: is {tensor.dtype}, but {dtype} is saved"]
