"""Ranks as threads, and shards cut by hand: what the checkpoint tests share."""

import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpar import checkpoint
from mpar.checkpoint import SaveOptions
from mpar.mesh import Mesh
from mpar.spec import P
from tests.processes import PATIENCE_S

State = dict[str, tuple[Tensor, P]]


def on_all_ranks(num_ranks: int, fn: Callable[[int, str], Any]) -> list[Any]:
    """`fn(rank, run)` in one thread per rank, with a name of a run that they share; results or exceptions, in rank order."""
    run = secrets.token_hex(8)

    def call(rank: int) -> Any:
        try:
            return fn(rank, run)
        except Exception as error:
            return error

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(call, range(num_ranks)))


def cut(x: Tensor, spec: P, mesh: Mesh, rank: int) -> Tensor:
    """The shard of `rank`, by repeated chunking along the coordinates: major axis first."""
    coordinates = mesh.coordinates(rank)
    for dim in range(x.ndim):
        for axis in spec.dim(dim):
            x = x.chunk(mesh.sizes[axis], dim)[coordinates[axis]] if x.shape[dim] else x
    return x


def save_all(folder: Path, step: int, state: State, mesh: Mesh, **options: Any) -> list[Any]:
    """Save the global `state` from all ranks of `mesh`."""
    extras = options.pop("extras", {"seed": 1})
    options = {"timeout_s": PATIENCE_S, "finite": False, **options}  # tests save any bits

    def save(rank: int, run: str) -> Path:
        tensors = {path: cut(x, spec, mesh, rank) for path, (x, spec) in state.items()}
        specs = {path: spec for path, (_, spec) in state.items()}
        shapes = {path: tuple(x.shape) for path, (x, _) in state.items()}
        return checkpoint.save(folder, step, tensors, specs, mesh, rank, shapes, extras, SaveOptions(run, **options))

    return on_all_ranks(mesh.size, save)


def wanted_of(state: State) -> Mapping[str, tuple[tuple[int, ...], P, torch.dtype]]:
    """What `load` is asked for to get `state` back."""
    return {path: (tuple(x.shape), spec, x.dtype) for path, (x, spec) in state.items()}


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Whether dtype, shape and every bit agree; NaNs count by their bits."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    raw = [x.contiguous().reshape(-1).view(torch.uint8).numpy() for x in (actual, expected)]
    return bool(np.array_equal(*raw))
