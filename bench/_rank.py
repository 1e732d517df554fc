"""What a rank does with a compiled workload; nothing here loads the compiler."""

import pickle
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from mpar.program import Program, State, batch_rows
from mpar.shards import shard

__all__ = ["load_step", "local_state", "make_step"]


def load_step(folder: Path, workload: ModuleType, cfg: Any, rank: int, transport: str | None) -> Callable[[], torch.Tensor]:
    """The step of the workload that `save_workload` left in `folder`."""
    program = pickle.loads((folder / "program.pickle").read_bytes())
    return make_step(program, torch.load(folder / "params.pt", mmap=True), workload, cfg, rank, transport)


def local_state(program: Program, params: dict[str, torch.Tensor], rank: int) -> State:
    """The state of `rank` before the first step: its shards of the weights, and zeros."""
    leaves = {}
    for leaf in program.part(rank).state_in:
        kind, _, path = leaf.path.partition(".")
        if kind == "params":
            leaves[leaf.path] = shard(params[path], leaf.spec, program.mesh, rank)
        else:
            path = path.partition(".")[2]
            leaves[leaf.path] = torch.zeros_like(shard(params[path], leaf.spec, program.mesh, rank))
    return State(leaves)


def make_step(
    program: Program, params: dict[str, torch.Tensor], workload: ModuleType, cfg: Any, rank: int, transport: str | None
) -> Callable[[], torch.Tensor]:
    """`step() -> loss` as the peers have it: each call takes a step on the next batch."""
    run, state, data = program.bind(transport=transport), [local_state(program, params, rank)], workload.batches(cfg)

    def step() -> torch.Tensor:
        tokens, labels = next(data)
        state[0], metrics = run(state[0], batch_rows(program, {"tokens": tokens, "labels": labels}, rank))
        return metrics["loss"]

    return step
