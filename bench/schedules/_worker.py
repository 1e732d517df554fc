"""One rank of a launch: the schedules of mpar and torch, and the floor, take one step each in turn. Rank 0 prints the times."""

import pickle
from collections.abc import Callable
from dataclasses import replace

import torch

from bench._rank import make_step
from bench._turns import Rank, joined, run_passes
from bench.schedules._names import TORCH

__all__ = ["main"]


def make_variants(rank: Rank) -> dict[str, Callable[[], torch.Tensor]]:
    """For each variant, by name, the function that takes its next step."""
    microbatches, cfg = rank.args.microbatches, rank.workload.CONFIGS[rank.args.config]
    cfg = replace(cfg, batch=max(cfg.batch, microbatches))
    params = torch.load(rank.work / "params.pt", mmap=True)
    torch_pp = rank.peer("torch_pp")
    steps = {}
    for name in rank.variants:
        who, _, schedule = name.partition(":")
        if who == "mpar":
            program = pickle.loads((rank.work / f"{schedule}.pickle").read_bytes())
            steps[name] = make_step(program, params, rank.workload, cfg, rank.rank, rank.args.transport)
        elif who == "torch":
            steps[name] = torch_pp.make_step(cfg, TORCH[schedule], microbatches)
        else:
            steps[name] = torch_pp.make_floor_step(cfg, microbatches)
    return steps


def main() -> None:
    """Entry of one rank."""
    rank = joined(numbers=["microbatches"], optional=["transport"])
    run_passes(make_variants(rank), rank)


if __name__ == "__main__":
    main()
