"""Turns: variants, each in processes of its own, take one step in turn, in a rotating order: what one rank of them does."""

import argparse
import contextlib
import datetime
import gc
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

from bench._machine import foreign_cpu_s
from bench._peers import find_peers, peer

__all__ = ["Rank", "Turns", "joined", "run_passes"]

_PATIENCE = datetime.timedelta(minutes=30)
"""For all that others do before it is a variant's turn: a pass, and before the first one what makes them ready."""

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
        """The variants of this launch, in order. All ranks make them in this order, because that makes process groups."""
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
    for name in ("order", "turns", *optional):
        parser.add_argument(f"--{name.replace('_', '-')}")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    folder = find_peers(args.peers)
    rank, num_ranks = peer(folder, "ranks").start()
    return Rank(args, Path(args.work), folder, peer(folder, "workload"), rank, num_ranks)


class Turns:
    """Whose turn it is. Each launch has one variant of `order`; they meet in the store that their launcher keeps at `address`.

    leads: whether this rank says for its launch that a step is taken.
    """

    def __init__(self, address: str, order: Sequence[str], mine: str, *, leads: bool) -> None:
        host, _, port = address.partition(":")
        self._store = dist.TCPStore(host, int(port), timeout=_PATIENCE)
        self._order, self._mine, self._leads, self._round = list(order), mine, leads, 0

    def meet(self) -> None:
        """Wait until all variants are ready."""
        if self._leads:
            self._store.set(f"ready {self._mine}", "")
        self._store.wait([f"ready {name}" for name in self._order])

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until the variant before this one has taken its step; afterwards it is the next one's turn."""
        count = len(self._order)
        number = self._round * count + (self._order.index(self._mine) - self._round) % count
        if number:
            self._store.wait([f"taken {number - 1}"])
        yield
        if self._leads:
            self._store.set(f"taken {number}", "")
        self._round += 1


def run_passes(steps: Steps, rank: Rank) -> None:
    """Measure the passes of the variant of this launch; rank 0 prints a line of JSON for each. Ends this process."""
    args, (name,) = rank.args, steps
    turns = Turns(args.turns, args.order.split(","), name, leads=rank.rank == 0)
    dist.barrier()
    turns.meet()
    for number in range(args.passes):
        start_s, own_s, all_s = time.monotonic(), time.process_time(), foreign_cpu_s()
        mine = _measure(steps[name], turns, args.steps, args.warmup if number == 0 else 0)
        own = torch.tensor(time.process_time() - own_s, dtype=torch.float64)
        dist.all_reduce(own)
        results = rank.peer("ranks").gather(mine)
        if results:
            busy = {"seconds": time.monotonic() - start_s, "own_s": float(own), "all_s": foreign_cpu_s() - all_s}
            sys.stdout.write(json.dumps({"variant": name, **busy, "ranks": results}) + "\n")
            sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # an ordinary exit would wait for process groups of some peers


def _measure(step: Callable[[], torch.Tensor], turns: Turns, count: int, warmup: int) -> dict[str, list[float]]:
    """Wall and CPU seconds and the loss of each step on this rank; losses cover the warm-up too."""
    out: dict[str, list[float]] = {"wall": [], "cpu": [], "main_cpu": [], "loss": []}
    for index in range(warmup + count):
        with turns.turn():
            dist.barrier()
            wall, cpu, main = time.perf_counter(), time.process_time(), time.thread_time()
            loss = step()
            spent = (time.perf_counter() - wall, time.process_time() - cpu, time.thread_time() - main)
            if index >= warmup:
                for key, value in zip(("wall", "cpu", "main_cpu"), spent, strict=True):
                    out[key].append(value)
            out["loss"].append(float(loss))
            gc.collect()
            dist.barrier()  # no rank still works when the next variant begins
    return out
