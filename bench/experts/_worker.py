"""One rank of a launch: every way of spreading experts takes one step in turn; rank 0 prints the times."""

import argparse
import logging
from pathlib import Path

import torch.distributed as dist

from bench._beside import OURS, program_step
from bench._peers import find_peers, peer
from bench.experts._case import sizes
from bench.experts._torch import make_step
from bench.spmd._worker import run_passes

__all__ = ["main"]


def main() -> None:
    """Entry of one rank."""
    parser = argparse.ArgumentParser()
    for name in ("work", "peers", "config", "variants"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("experts", "top-k", "steps", "warmup", "passes"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    folder = find_peers(args.peers)
    workload, ranks = peer(folder, "workload"), peer(folder, "ranks")
    rank, size = ranks.start()
    cfg = sizes(workload.CONFIGS[args.config], args.experts, args.top_k)
    steps = {}
    for name in args.variants.split(","):
        who, _, method = name.partition(":")
        if who in OURS:
            steps[name] = program_step(name, Path(args.work), workload, cfg, rank)
        else:
            steps[name] = make_step(workload, cfg, method, size)
    dist.barrier()
    run_passes(steps, args, ranks)


if __name__ == "__main__":
    main()
