"""All variants of the layer, in turn, in one process: their results must agree; then medians of paired ratios with intervals."""

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from bench._machine import foreign_cpu_s, this_run
from bench._passes import median_ms
from bench._result import Json, Result
from bench._statistics import interval_text, paired_ratio, verdict
from bench.moe._variants import VARIANTS, Case, Data, make

__all__ = ["BARS", "ResultsDiffer", "check_results", "layer", "table"]

TOLERANCE = 1e-5
BARS = {"dense": 1.3, "transformers": 1 / 3}
"""The largest allowed ratio of wall times, mpar / peer, at the sizes of `Case()`."""

Times = dict[str, dict[str, list[list[float]]]]
"""Seconds by variant, by clock, by pass, by step."""


class ResultsDiffer(Exception):
    """Two variants did not compute the same results."""


def check_results(results: Mapping[str, Mapping[str, Tensor]]) -> float:
    """The largest relative difference from the first variant. Raises ResultsDiffer, which lists all that are beyond TOLERANCE."""
    first, *others = results
    worst, problems = 0.0, []
    for name in others:
        for key, value in results[name].items():
            expected = results[first][key]
            error = float((value.double() - expected.double()).norm() / expected.double().norm())
            if not error <= TOLERANCE:
                problems.append(f"  {key} of {name}: {error:.1e} from that of {first}")
            worst = max(worst, error)
    if problems:
        raise ResultsDiffer("\n".join(["results differ:", *problems]))
    return worst


def layer(case: Case, threads: int, *, passes: int, steps: int) -> list[Result]:
    """One line for each variant, with `threads` threads. Raises ResultsDiffer."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        data = Data.draw(case)
        runs = {name: make(name, case, data) for name in VARIANTS}
        results = {name: run() for name, run in runs.items()}
        error = check_results({name: results[name] for name in VARIANTS if not name.startswith(("dense", "products"))})
        del results
        times, foreign = _measure(runs, passes, steps)
    finally:
        torch.set_num_threads(before)
    facts: dict[str, Json] = {"bench": "moe layer", "threads": threads, **asdict(case), "foreign_cores": foreign}
    facts |= {"gflop": round(case.flops / 1e9, 2), "moved_mb": round(case.moved_bytes / 1e6, 1), "largest_difference": error}
    origin = this_run()
    return [Result.of(_line(name, times, case) | facts, origin) for name in VARIANTS]


def _measure(runs: Mapping[str, Any], passes: int, steps: int) -> tuple[Times, list[float]]:
    """In each step every variant runs once, in a rotating order. Returns the times, and by pass the cores that others used."""
    names = list(runs)
    times: Times = {name: {"wall": [], "cpu": []} for name in names}
    foreign = []
    for _ in range(passes):
        start_s, own_s, all_s = time.monotonic(), time.process_time(), foreign_cpu_s()
        for clocks in times.values():
            for rows in clocks.values():
                rows.append([])
        for index in range(steps):
            turn = index % len(names)
            for name in names[turn:] + names[:turn]:
                wall, cpu = time.perf_counter(), time.process_time()
                runs[name]()
                times[name]["wall"][-1].append(time.perf_counter() - wall)
                times[name]["cpu"][-1].append(time.process_time() - cpu)
        gc.collect()
        others_s = foreign_cpu_s() - all_s - (time.process_time() - own_s)
        foreign.append(round(max(0.0, others_s / (time.monotonic() - start_s)), 3))
    return times, foreign


def _line(name: str, times: Times, case: Case) -> dict[str, Json]:
    wall_ms, cpu_ms = (median_ms(times[name][clock]) for clock in ("wall", "cpu"))
    line: dict[str, Json] = {"variant": name, "median_ms": round(wall_ms, 3), "cpu_ms": round(cpu_ms, 3)}
    line["gflop_per_s"] = round(case.flops / 1e6 / wall_ms, 2)
    for ours in ("mpar", "mpar_eager", "products"):
        for clock in ("wall", "cpu") if ours != name else ():
            ratio = paired_ratio(times[ours][clock], times[name][clock])
            line[f"{ours}_over_this_{clock}"] = ratio.rounded()
            line["pairs"], line["passes"] = ratio.count, ratio.passes
    if name in BARS and case == Case():
        line["bar"] = round(BARS[name], 4)
    return line


def table(results: Sequence[Result]) -> str:
    """Markdown: one row for each variant. The last column bounds what a program with the same products can gain over the row."""
    rows = [
        "| experts, top-k, d, mlp, tokens | threads | variant | ms | CPU ms | GFLOP/s | mpar / this, wall (95 %) "
        "| eager mpar / this | bar | mpar / this, CPU | products alone / this, CPU | foreign cores |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        sizes = ", ".join(str(result.case[key]) for key in ("experts", "top_k", "d", "mlp", "tokens"))
        keys = ("mpar_over_this_wall", "mpar_eager_over_this_wall", "mpar_over_this_cpu", "products_over_this_cpu")
        wall, eager, cpu, floor = (interval_text(result.numbers(key) if result.has(key) else None) for key in keys)
        bar = f"{result.figures['bar']} {verdict(result.numbers(keys[0]), result.number('bar'))}" if result.has("bar") else ""
        foreign = "/".join(f"{x:.1f}" for x in result.numbers("foreign_cores"))
        figures = (*(f"{result.number(key):.1f}" for key in ("median_ms", "cpu_ms")), f"{result.number('gflop_per_s'):.0f}")
        names = (sizes, str(result.case["threads"]), result.text("variant"))
        rows.append(f"| {' | '.join((*names, *figures, wall, eager, bar, cpu, floor, foreign))} |")
    return "\n".join(rows) + "\n"
