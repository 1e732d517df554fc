"""One rank of a launch: in each pass every variant takes one step in turn, in a rotating order; rank 0 prints the times."""

import argparse
import contextlib
import gc
import io
import json
import logging
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from bench._machine import foreign_cpu_s
from bench._peers import find_peers, peer
from bench._rank import load_step

__all__ = ["main", "run_passes"]


def make_variants(args: argparse.Namespace, folder: Path, workload: ModuleType, cfg: Any) -> dict[str, Any]:
    """`{name: step function}`; every rank makes them in the same order, because making them makes process groups."""
    rank = dist.get_rank()
    steps: dict[str, Any] = {}
    for name in args.variants.split(","):
        kind, _, mode = name.partition("_")
        if kind == "mpar":
            steps[name] = load_step(Path(args.work), workload, cfg, rank, "backend" if mode == "gloo" else None)
        elif kind == "transformers":
            steps[name] = transformers_step(peer(folder, "hf_eager"), workload, cfg)
        elif kind == "torch":
            steps[name] = peer(folder, "torch_spmd").make_step(cfg, args.mesh)
        elif kind == "titan":  # last, since importing it patches torch
            with contextlib.redirect_stderr(io.StringIO()):
                steps[name] = peer(folder, "torchtitan_cpu").make_step(cfg, args.mesh, mode, False)
        else:
            steps[name] = peer(folder, "floor").make_step(cfg, args.mesh, mode)
    return steps


def transformers_step(hf_eager: ModuleType, workload: ModuleType, cfg: Any):
    """The step that the peer `hf_eager` takes."""
    model = hf_eager.build(cfg)
    optimizer, data = workload.adamw(model.parameters()), workload.batches(cfg)

    def step() -> torch.Tensor:
        tokens, labels = next(data)
        loss = workload.cross_entropy(model(input_ids=tokens).logits, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), workload.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def measure(steps: dict[str, Any], count: int, warmup: int) -> dict[str, dict[str, list[float]]]:
    """Wall and CPU seconds, page faults and the loss of each step of each variant on this rank; losses cover the warm-up too."""
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


def main() -> None:
    """Entry of one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", required=True)
    parser.add_argument("--peers", required=True)
    parser.add_argument("--config", required=True)
    parser.add_argument("--mesh", required=True)
    parser.add_argument("--variants", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--passes", type=int, required=True)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    folder = find_peers(args.peers)
    workload, ranks = peer(folder, "workload"), peer(folder, "ranks")
    ranks.start()
    cfg = workload.CONFIGS[args.config]
    run_passes(make_variants(args, folder, workload, cfg), args, ranks)


def run_passes(steps: dict[str, Any], args: argparse.Namespace, ranks: ModuleType) -> None:
    """Measure `args.passes` passes of all variants; rank 0 prints a line of JSON for each. Ends this process."""
    dist.barrier()
    for number in range(args.passes):
        start_s, own_s, all_s = time.monotonic(), time.process_time(), foreign_cpu_s()
        mine = measure(steps, args.steps, args.warmup if number == 0 else 0)
        own = torch.tensor(time.process_time() - own_s, dtype=torch.float64)
        dist.all_reduce(own)
        results = ranks.gather(mine)
        if results:
            foreign = (foreign_cpu_s() - all_s - float(own)) / (time.monotonic() - start_s)
            sys.stdout.write(json.dumps({"foreign_cores": round(max(0.0, foreign), 3), "ranks": results}) + "\n")
            sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # tearing down some peers waits for their process groups


if __name__ == "__main__":
    main()
