"""The layer in every way, in turn, in one process: results that agree, then medians of paired ratios with intervals."""

import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from bench._machine import foreign_cpu_s, machine
from bench._statistics import paired_ratio
from bench.moe._variants import VARIANTS, Case, Data, make

__all__ = ["BARS", "ResultsDiffer", "check_results", "layer", "table"]

TOLERANCE = 1e-5
BARS = {"dense": 1.3, "transformers": 1 / 3}
"""Largest allowed mpar / peer, at the sizes of `Case()`; they are judged by wall time."""

Times = dict[str, dict[str, list[list[float]]]]
"""Seconds by variant, by clock, by pass, by step."""


class ResultsDiffer(Exception):
    """Two variants did not compute the same."""


def check_results(results: Mapping[str, Mapping[str, Tensor]]) -> float:
    """The largest relative difference from the first variant. Raises ResultsDiffer beyond TOLERANCE, with all offenders."""
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


def layer(case: Case, threads: int, *, passes: int, steps: int) -> list[dict[str, Any]]:
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
    facts = machine() | {"bench": "moe layer", "threads": threads, **asdict(case)}
    facts |= {"gflop": round(case.flops / 1e9, 2), "moved_mb": round(case.moved_bytes / 1e6, 1), "largest_difference": error}
    return [_line(name, times, case) | facts | {"foreign_cores": foreign} for name in VARIANTS]


def _measure(runs: Mapping[str, Any], passes: int, steps: int) -> tuple[Times, list[float]]:
    """Each step every variant runs once, in an order that rotates; and the cores that other processes used, by pass."""
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


def _line(name: str, times: Times, case: Case) -> dict[str, Any]:
    wall, cpu = (_middle(times[name][clock]) for clock in ("wall", "cpu"))
    line: dict[str, Any] = {"variant": name, "median_ms": round(1e3 * wall, 3), "cpu_ms": round(1e3 * cpu, 3)}
    line["gflop_per_s"] = round(case.flops / 1e9 / wall, 2)
    for ours in ("mpar", "mpar_eager", "products"):
        for clock in ("wall", "cpu") if ours != name else ():
            ratio = paired_ratio(times[ours][clock], times[name][clock])
            line[f"{ours}_over_this_{clock}"] = [round(x, 4) for x in (ratio.median, ratio.low, ratio.high)]
            line["pairs"], line["passes"] = ratio.count, ratio.passes
    if name in BARS and case == Case():
        line["bar"] = round(BARS[name], 4)
    return line


def _middle(passes: Sequence[Sequence[float]]) -> float:
    return statistics.median(x for steps in passes for x in steps)


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: one row for each variant. The last column bounds what any program with these products can gain over the row."""
    rows = [
        "| experts, top-k, d, mlp, tokens | threads | variant | ms | CPU ms | GFLOP/s | mpar / this, wall (95 %) "
        "| eager mpar / this | bar | mpar / this, CPU | products alone / this, CPU | foreign cores |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        sizes = ", ".join(str(line[key]) for key in ("experts", "top_k", "d", "mlp", "tokens"))
        keys = ("mpar_over_this_wall", "mpar_eager_over_this_wall", "mpar_over_this_cpu", "products_over_this_cpu")
        wall, eager, cpu, floor = (_shown(line.get(key)) for key in keys)
        bar = f"{line['bar']} {_verdict(line)}" if "bar" in line else ""
        foreign = "/".join(f"{x:.1f}" for x in line["foreign_cores"])
        figures = (f"{line['median_ms']:.1f}", f"{line['cpu_ms']:.1f}", f"{line['gflop_per_s']:.0f}")
        rows.append(
            f"| {' | '.join((sizes, str(line['threads']), line['variant'], *figures, wall, eager, bar, cpu, floor, foreign))} |"
        )
    return "\n".join(rows) + "\n"


def _shown(values: Sequence[float] | None) -> str:
    return "" if values is None else f"{values[0]:.3f} ({values[1]:.3f} to {values[2]:.3f})"


def _verdict(line: Mapping[str, Any]) -> str:
    """The whole interval under the bar, its lower end, or nothing of it."""
    _, low, high = line["mpar_over_this_wall"]
    return "met" if high <= line["bar"] else "straddled" if low <= line["bar"] else "**missed**"
