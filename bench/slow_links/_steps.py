"""One rank that takes steps of several variants in turn, at several rates. Rank 0 prints a line of JSON for each pass.

Variants: mpar, on gloo; mpar:STRATEGY and mpar:SCHEDULE, likewise; torch, as the peers have it; torch_bucket with gradients in
buckets of --bucket-mb; torch_async with FSDP2's gathers issued one unit ahead.
"""

import functools
import gc
import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from bench._machine import foreign_cpu_s
from bench._rank import make_step
from bench._turns import Rank, joined
from bench.slow_links._links import UNLIMITED
from bench.slow_links._ranks import set_rate, wire_bytes

__all__ = ["main"]

Step = Callable[[], torch.Tensor]


def make_variants(rank: Rank) -> dict[str, Step]:
    """For each variant, by name, the function that takes its next step."""
    cfg, mesh = rank.workload.CONFIGS[rank.args.config], rank.args.mesh
    steps = {}
    for name in rank.variants:
        if name.startswith("mpar"):
            program = pickle.loads((rank.work / f"{name}.pickle").read_bytes())
            params = torch.load(rank.work / "params.pt", mmap=True)
            steps[name] = make_step(program, params, rank.workload, cfg, rank.rank, "backend")
        else:
            steps[name] = torch_step(rank.peer("torch_spmd"), cfg, mesh, name.partition("_")[2], float(rank.args.bucket_mb))
    return steps


def torch_step(torch_spmd: ModuleType, cfg: Any, mesh: str, option: str, bucket_mb: float) -> Step:
    """The peers' step, with DDP or FSDP2 told what `option` says."""
    parallel, build, models = torch.nn.parallel, torch_spmd.build, []
    ddp = parallel.DistributedDataParallel

    def noted(*args: Any) -> Any:
        built = build(*args)
        models.append(built[0])
        return built

    torch_spmd.build = noted  # type: ignore[attr-defined]
    if option == "bucket":
        parallel.DistributedDataParallel = functools.partial(ddp, bucket_cap_mb=bucket_mb)  # type: ignore[misc, assignment]
    try:
        step = torch_spmd.make_step(cfg, mesh)
    finally:
        torch_spmd.build, parallel.DistributedDataParallel = build, ddp  # type: ignore[attr-defined, misc]
    if option == "async":
        (model,) = models
        layers = list(model.layers.values())
        for unit in (model, *layers):
            unit._set_unshard_async_op(True)
        for unit, following in zip([model, *layers], layers, strict=False):
            unit.set_modules_to_forward_prefetch([following])
    return step


def measure(steps: Mapping[str, Step], turn: int) -> dict[str, list[float]]:
    """One step of each variant: by name the seconds of the slowest rank, the bytes in the busier direction of the busiest link,
    and the loss.
    """
    names = list(steps)
    out = {}
    for name in names[turn % len(names) :] + names[: turn % len(names)]:
        dist.barrier()
        before, began = wire_bytes(), time.perf_counter()
        loss = float(steps[name]())
        seconds = time.perf_counter() - began
        dist.barrier()  # what others have still to send belongs to this step
        moved = max(now - then for now, then in zip(wire_bytes(), before, strict=True))
        found = torch.tensor([seconds, moved, loss], dtype=torch.float64)
        dist.all_reduce(found[:2], dist.ReduceOp.MAX)
        dist.all_reduce(found[2:])
        out[name] = [float(found[0]), float(found[1]), float(found[2]) / dist.get_world_size()]
    return out


def run_at(rate: str, rank: Rank) -> None:
    """Change the rate of all links, while no rank sends."""
    dist.barrier()
    if rank.rank == 0:
        set_rate(rate)
    dist.barrier()


def main() -> None:
    """The entry of a rank."""
    rank = joined(texts=["mesh", "rates", "bucket-mb"])
    steps = make_variants(rank)
    rates = [UNLIMITED, *rank.args.rates.split(",")]
    for _ in range(rank.args.warmup):
        measure(steps, 0)
    for _ in range(rank.args.passes):
        began, busy, own = time.monotonic(), foreign_cpu_s(), time.process_time()
        found: dict[str, list[dict[str, list[float]]]] = {rate: [] for rate in rates}
        for turn in range(rank.args.steps):
            for rate in rates:
                run_at(rate, rank)
                found[rate].append(measure(steps, turn))
            gc.collect()
        used = torch.tensor(time.process_time() - own, dtype=torch.float64)
        dist.all_reduce(used)
        foreign = (foreign_cpu_s() - busy - float(used)) / (time.monotonic() - began)
        if rank.rank == 0:
            sys.stdout.write(json.dumps({"foreign_cores": round(max(0.0, foreign), 3), "rates": found}) + "\n")
            sys.stdout.flush()
    run_at(UNLIMITED, rank)
    os._exit(0)  # an ordinary exit would wait for process groups of the peers


if __name__ == "__main__":
    main()
