"""Turns: how one rank of a launch measures its variants, which take one step each in turn, in a rotating order."""

import argparse
import gc
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

from bench._machine import foreign_cpu_s
from bench._peers import find_peers, peer

__all__ = ["Rank", "joined", "run_passes"]

Steps = Mapping[str, Callable[[], torch.Tensor]]
"""For each variant, the function that takes its next step and gives the loss."""


@dataclass(frozen=True)
class Rank:
    """One rank that has joined the others. `work`: the folder that the launcher filled; `peers`: the folder of the peers."""

    args: argparse.Namespace
    work: Path
    peers: Path
    workload: ModuleType
    rank: int
    num_ranks: int

    @property
    def variants(self) -> list[str]:
        """The variants that are measured, in order. All ranks make them in this order, because that makes process groups."""
        return self.args.variants.split(",")

    def peer(self, name: str) -> ModuleType:
        """The peers' module `name`."""
        return peer(self.peers, name)


def joined(*, texts: Sequence[str] = (), numbers: Sequence[str] = (), optional: Sequence[str] = ()) -> Rank:
    """Read the arguments that `launched` gives a rank, and join the other ranks. The names are those a benchmark adds."""
    parser = argparse.ArgumentParser()
    for name in ("work", "peers", "config", "variants", *texts):
        parser.add_argument(f"--{name}", required=True)
    for name in ("steps", "warmup", "passes", *numbers):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, required=True)
    for name in optional:
        parser.add_argument(f"--{name.replace('_', '-')}")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    folder = find_peers(args.peers)
    rank, num_ranks = peer(folder, "ranks").start()
    return Rank(args, Path(args.work), folder, peer(folder, "workload"), rank, num_ranks)


def run_passes(steps: Steps, rank: Rank) -> None:
    """Measure the passes of all variants; rank 0 prints a line of JSON for each. Ends this process."""
    args = rank.args
    dist.barrier()
    for number in range(args.passes):
        start_s, own_s, all_s = time.monotonic(), time.process_time(), foreign_cpu_s()
        mine = _measure(steps, args.steps, args.warmup if number == 0 else 0)
        own = torch.tensor(time.process_time() - own_s, dtype=torch.float64)
        dist.all_reduce(own)
        results = rank.peer("ranks").gather(mine)
        if results:
            foreign = (foreign_cpu_s() - all_s - float(own)) / (time.monotonic() - start_s)
            sys.stdout.write(json.dumps({"foreign_cores": round(max(0.0, foreign), 3), "ranks": results}) + "\n")
            sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # an ordinary exit would wait for process groups of some peers


def _measure(steps: Steps, count: int, warmup: int) -> dict[str, dict[str, list[float]]]:
    """Wall and CPU seconds and the loss of each step of each variant on this rank; losses cover the warm-up too."""
    names = list(steps)
    out: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": [], "main_cpu": [], "loss": []} for name in names}
    for index in range(warmup + count):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            dist.barrier()
            wall, cpu, main = time.perf_counter(), time.process_time(), time.thread_time()
            loss = steps[name]()
            spent = (time.perf_counter() - wall, time.process_time() - cpu, time.thread_time() - main)
            if index >= warmup:
                for key, value in zip(("wall", "cpu", "main_cpu"), spent, strict=True):
                    out[name][key].append(value)
            out[name]["loss"].append(float(loss))
        gc.collect()
    return out
