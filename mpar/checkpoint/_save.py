"""Saving once: `save` makes a saver, begins, and waits. Whoever saves again and again keeps a Saver."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from mpar.checkpoint._saver import SaveOptions, Saver
from mpar.checkpoint._state import Json
from mpar.errors import CheckpointError
from mpar.mesh import Mesh
from mpar.spec import P

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
    options: SaveOptions | None = None,
) -> Path:
    """Write the checkpoint of `step` into `folder`, on all ranks of `mesh` together; returns its path once it is on the disk.

    tensors:     for each path this rank's shard, on any device.
    specs, shapes:  for the same paths the spec and the global shape of the tensor.
    extras:      step, data position, seed, config, as JSON values; those of rank 0 are written.
    options:     several ranks give a `run` that no earlier call had, such as a random name.

    Raises CheckpointError on every rank if any rank failed, and NumericsError if a value is not finite; then there is no new
    checkpoint, and none was deleted.
    """
    problems = []
    for path in sorted(set(tensors) | set(specs) | set(shapes)):
        absent = [name for name, given in (("tensors", tensors), ("specs", specs), ("shapes", shapes)) if path not in given]
        problems += [f"{path}: is not in {' nor in '.join(absent)}"] if absent else []
    named = sorted(set(tensors) & set(specs) & set(shapes))
    leaves = {path: (tuple(shapes[path]), specs[path], tensors[path].dtype) for path in named}
    device = next((x.device for x in tensors.values()), None)
    saver = Saver(folder, leaves, mesh, rank, options, device=device, problems=problems)
    saver.begin(step, {path: tensors[path] for path in leaves}, extras)
    made = saver.wait()
    if made is None:
        raise CheckpointError(f"cannot save step {step} into {folder}: the thread that writes has died")
    return made
