"""A small state of two ranks, and savers of it, as threads."""

import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpar import checkpoint
from mpar.checkpoint import Keep, SaveOptions, Saver
from mpar.errors import CheckpointError
from mpar.mesh import Mesh
from mpar.spec import P
from tests.checkpoint.ranks import cut, same_bits

__all__ = ["MESH", "RANKS", "is_step", "newest_readable", "on_ranks", "savers", "shards"]

MESH = Mesh(dp=2)
RANKS = range(MESH.size)
SPECS = {"table": P("dp"), "bias": P()}


def values(step: int) -> dict[str, Tensor]:
    """The global state after `step`."""
    generator = torch.Generator().manual_seed(step)
    return {"table": torch.randn(6, 5, generator=generator), "bias": torch.randn(3, generator=generator).bfloat16()}


def shards(step: int, rank: int) -> dict[str, Tensor]:
    """Those of `rank`."""
    return {name: cut(x, SPECS[name], MESH, rank).clone() for name, x in values(step).items()}


def savers(folder: Path, *, timeout_s: float = 60.0, keep: Keep | None = None) -> list[Saver]:
    """A saver for each rank of one run."""
    options = SaveOptions(secrets.token_hex(4), keep, timeout_s)
    leaves = {name: (tuple(x.shape), SPECS[name], x.dtype) for name, x in values(0).items()}
    return [Saver(folder, leaves, MESH, rank, options) for rank in RANKS]


def on_ranks(call: Callable[[int], Any]) -> list[Any]:
    """`call(rank)` in a thread for each rank; results, or the CheckpointErrors that it raised."""

    def catch(rank: int) -> Any:
        try:
            return call(rank)
        except CheckpointError as error:
            return error

    with ThreadPoolExecutor(MESH.size) as pool:
        return list(pool.map(catch, RANKS))


def is_step(path: Path, step: int) -> bool:
    """Whether all of the checkpoint at `path` is sound, and has the bits of `step`."""
    try:
        checkpoint.verify(path)
    except CheckpointError:
        return False
    wanted = {name: (tuple(x.shape), P(), x.dtype) for name, x in values(step).items()}
    loaded = checkpoint.load(path, wanted, Mesh(), 0)
    return all(same_bits(loaded[name], x) for name, x in values(step).items())


def newest_readable(folder: Path) -> int:
    """The step of the checkpoint that a run would go on from; its bits are right. 0: there is none."""
    path = checkpoint.latest(folder)
    if path is None:
        return 0
    step = int(path.name.removeprefix("step_"))
    assert is_step(path, step), f"{path} is the newest, but not that of step {step}"
    return step
