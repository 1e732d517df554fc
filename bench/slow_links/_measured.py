"""Measures behind links, and makes lines of results of what the ranks print."""

import json
import pickle
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench._losses import largest_spread
from bench._machine import foreign_cpu_s, this_run
from bench._passes import Passes
from bench._peers import peer
from bench._result import Json, Result
from bench._statistics import paired_ratio
from bench._workload import MESHES, compile_workload, initial_params
from bench.slow_links._links import UNLIMITED, Links, bits_per_s
from bench.slow_links._ranks import run_ranks
from mpar.compiler import Schedule
from mpar.hardware import Hardware, hardware
from mpar.schedules import SCHEDULES

__all__ = ["measure_steps", "measure_wire"]

WIRE_BAR = 1.1


def measure_wire(num_ranks: int, rate: str, numbers: int, repeats: int) -> list[Result]:
    """A line for each operation: `wire_ratio` is the median time over that of its bytes, `worst` the highest."""
    began, busy = time.monotonic(), foreign_cpu_s()
    with Links(num_ranks, UNLIMITED) as links:
        found = json.loads(run_ranks(links, "bench.slow_links._wire", [rate, str(numbers), str(repeats)]))
    cores = (foreign_cpu_s() - busy) / (time.monotonic() - began)
    results = []
    for name, calls in found.items():
        ratios = [seconds * bits_per_s(rate) / (8 * moved) for seconds, moved in calls]
        figures = {
            "megabytes": round(statistics.median(moved for _, moved in calls) / 1e6, 3),
            "ms": round(1e3 * statistics.median(seconds for seconds, _ in calls), 2),
            "wire_ratio": round(statistics.median(ratios), 3),
            "worst": round(max(ratios), 3),
            "bar": WIRE_BAR,
            "busy_cores": round(cores, 2),  # of all processes, these too
        }
        case = {"bench": "slow_links", "case": "wire", "ranks": num_ranks, "rate": rate, "threads": 1, "variant": name}
        results.append(Result.of({**case, **figures}, this_run()))
    return results


def measure_steps(
    config: str,
    mesh: str,
    rates: Sequence[str],
    variants: Sequence[str],
    bucket_mb: float,
    folder: Path,
    passes: Passes,
    options: Mapping[str, int],
) -> list[Result]:
    """A line for each rate and variant: its step and the ratio of mpar's to it, what it takes without limits, what its bytes
    take, and `overlap`, the share of the shorter of the two that was hidden: median, lowest and highest of the passes.

    bucket_mb: of torch_bucket. options: of mpar's program.
    """
    workload = peer(folder, "workload")
    measured: list[Any] = []
    with tempfile.TemporaryDirectory() as work, Links(MESHES[mesh][0].size, UNLIMITED) as links:
        cfg = workload.CONFIGS[config]
        for name in variants:
            if name.startswith("mpar"):
                told = compile_options(options, rates[0]) | of_variant(name, cfg.batch, rates[0])
                (Path(work) / f"{name}.pickle").write_bytes(pickle.dumps(compile_workload(cfg, workload, mesh, **told)))
        torch.save(initial_params(cfg, workload), Path(work) / "params.pt")
        arguments = {"work": work, "peers": folder, "config": config, "mesh": mesh, "rates": ",".join(rates)}
        arguments |= {"variants": ",".join(variants), "bucket-mb": bucket_mb}
        counts = {"steps": passes.steps, "warmup": passes.warmup, "passes": passes.passes}
        words = [word for key, value in (arguments | counts).items() for word in (f"--{key}", str(value))]
        for _ in range(passes.launches):
            links.set_rate(UNLIMITED)
            measured += [json.loads(line) for line in run_ranks(links, "bench.slow_links._steps", words).splitlines()]
    facts: dict[str, Json] = {"bench": "slow_links", "case": "steps", "config": config, "mesh": mesh, "threads": 1}
    facts |= {"options": options, "passes": passes.passes, "foreign_cores": [one["foreign_cores"] for one in measured]}
    spreads = [largest_spread({name: _column(measured, rate, name, 2) for name in variants}) for rate in (UNLIMITED, *rates)]
    facts["loss_spread"] = max(spreads)
    lines = [_line(measured, rate, name, variants, bucket_mb) for rate in rates for name in variants]
    return [Result.of({**facts, **line}, this_run()) for line in lines]


def compile_options(options: Mapping[str, int], rate: str) -> dict[str, Any]:
    """What `compile_step` is told: `paired` stands for two microbatches at a time, hidden on CPUs with links of this rate."""
    told: dict[str, Any] = {key: value for key, value in options.items() if key != "paired"}
    if options.get("paired"):
        told |= {"hardware": _behind(rate), "schedule": Schedule(paired=True), "num_microbatches": 2}
    return told


def _behind(rate: str) -> Hardware:
    """This machine's processors behind links of this rate."""
    links = {"link_bytes_per_s": bits_per_s(rate) / 8, "link_latency_s": 2e-4, "ranks_per_node": 1 << 30}
    return replace(hardware("cpu"), overlaps=True, **links)


def of_variant(name: str, num_rows: int, rate: str) -> dict[str, Any]:
    """What `compile_step` is told for a variant: "mpar:zero1" has another strategy than that of the mesh, "mpar:zbv" is a
    schedule with one row of the batch in each microbatch, compiled for links of this rate.
    """
    word = name.partition(":")[2]
    if word in SCHEDULES:
        return {"schedule": word, "num_microbatches": num_rows, "hardware": _behind(rate)}
    return {"strategy": word} if word else {}


def _line(measured: list[Any], rate: str, name: str, variants: Sequence[str], bucket_mb: float) -> dict[str, Json]:
    steps, alone = _column(measured, rate, name, 0), _column(measured, UNLIMITED, name, 0)
    wire = [[8 * moved / bits_per_s(rate) for moved in values] for values in _column(measured, rate, name, 1)]
    overlap = []
    for step, compute, communicate in zip(steps, alone, wire, strict=True):
        a, b, both = statistics.median(compute), statistics.median(communicate), statistics.median(step)
        overlap.append((a + b - both) / min(a, b))
    line: dict[str, Json] = {"rate": rate, "variant": name}
    for key, columns in (("step_ms", steps), ("compute_ms", alone), ("communication_ms", wire)):
        line[key] = round(1e3 * statistics.median(statistics.median(values) for values in columns), 2)
    line["overlap"] = [round(x, 3) for x in (statistics.median(overlap), min(overlap), max(overlap))]
    if name == "torch_bucket":
        line["bucket_mb"] = bucket_mb
    first = variants[0]
    if name != first and first.startswith("mpar"):
        line[f"{first}_over_this_wall"] = paired_ratio(_column(measured, rate, first, 0), steps).rounded(3)
    return line


def _column(measured: list[Any], rate: str, name: str, index: int) -> list[list[float]]:
    """By pass, the figures of the steps of a variant at a rate."""
    return [[turn[name][index] for turn in one["rates"][rate]] for one in measured]
