"""One rank of a launch: every schedule of mpar and of torch, and the floor, take one step in turn; rank 0 prints the times."""

import argparse
import logging
import pickle
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from bench._peers import find_peers, peer
from bench._rank import make_step
from bench.schedules._names import TORCH
from bench.spmd._worker import run_passes

__all__ = ["main"]


def make_variants(args: argparse.Namespace, folder: Path, workload: ModuleType, cfg: Any) -> dict[str, Any]:
    """`{name: step function}`; every rank makes them in the same order, because making them makes process groups."""
    rank, work = dist.get_rank(), Path(args.work)
    params = torch.load(work / "params.pt", mmap=True)
    torch_pp = peer(folder, "torch_pp")
    steps: dict[str, Any] = {}
    for name in args.variants.split(","):
        who, _, schedule = name.partition(":")
        if who == "mpar":
            program = pickle.loads((work / f"{schedule}.pickle").read_bytes())
            steps[name] = make_step(program, params, workload, cfg, rank, args.transport)
        elif who == "torch":
            steps[name] = torch_pp.make_step(cfg, TORCH[schedule], args.microbatches)
        else:
            steps[name] = torch_pp.make_floor_step(cfg, args.microbatches)
    return steps


def main() -> None:
    """Entry of one rank."""
    parser = argparse.ArgumentParser()
    for name in ("work", "peers", "config", "variants"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--transport")
    for name in ("microbatches", "steps", "warmup", "passes"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    folder = find_peers(args.peers)
    workload, ranks = peer(folder, "workload"), peer(folder, "ranks")
    ranks.start()
    cfg = workload.CONFIGS[args.config]
    cfg = replace(cfg, batch=max(cfg.batch, args.microbatches))
    run_passes(make_variants(args, folder, workload, cfg), args, ranks)


if __name__ == "__main__":
    main()
