"""Steps of pipelines on gloo: mpar's schedules beside torch's and the floor, in the same processes; ratios with intervals."""

import pickle
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from bench._losses import largest_spread
from bench._machine import this_run
from bench._passes import Measured, Passes, columns, launched, median_ms
from bench._peers import peer
from bench._result import Json, Result
from bench._statistics import interval_text, paired_ratio, verdict
from bench._workload import build_model, initial_params, peers_optimizer
from bench.schedules._names import FLOOR_BAR, TORCH, ZBV_BAR, wall_bar
from mpar.mesh import Mesh
from mpar.program.compile import compile_step

__all__ = ["Case", "run", "table"]


@dataclass(frozen=True)
class Case:
    """A config of the peers on `ranks` ranks. transport: how our messages are sent; None: as the program chooses."""

    config: str
    ranks: int
    microbatches: int
    transport: str | None


def run(case: Case, schedules: Sequence[str], *, folder: Path, passes: Passes) -> list[Result]:
    """One line for each variant. Raises LossesDiffer or RankFailed."""
    workload = peer(folder, "workload")
    cfg = workload.CONFIGS[case.config]
    cfg = replace(cfg, batch=max(cfg.batch, case.microbatches))
    variants = [f"mpar:{s}" for s in schedules] + [f"torch:{s}" for s in schedules if s in TORCH] + ["floor"]
    arguments = {"peers": folder, "config": case.config, "microbatches": case.microbatches, "transport": case.transport}
    measured = launched(
        case.ranks,
        "bench.schedules._worker",
        lambda work: _save(work, cfg, workload, case, schedules),
        {variant: variant.partition(":")[0] == "mpar" for variant in variants},
        arguments,
        passes,
    )
    return _summarise(case, passes.launches, measured)


def _save(work: Path, cfg: Any, workload: ModuleType, case: Case, schedules: Sequence[str]) -> None:
    model, optimizer, mesh = build_model(cfg, workload), peers_optimizer(workload), Mesh(pp=case.ranks)
    for name in schedules:
        program = compile_step(
            model, optimizer, mesh, "ddp", (cfg.batch, cfg.seq), num_microbatches=case.microbatches, schedule=name
        )
        (work / f"{name}.pickle").write_bytes(pickle.dumps(program))
    torch.save(initial_params(cfg, workload), work / "params.pt")


def _summarise(case: Case, launches: int, measured: Sequence[Measured]) -> list[Result]:
    names = list(measured[0]["ranks"][0])
    losses = columns(measured, [name for name in names if name != "floor"], "loss", _of_those_that_have_it)
    wall, cpu = columns(measured, names, "wall", max), columns(measured, names, "cpu", sum)
    main_cpu = columns(measured, names, "main_cpu", sum)
    about = {"launches": launches, "foreign_cores": [p["foreign_cores"] for p in measured], "loss_spread": largest_spread(losses)}
    origin, results = this_run(), []
    for name in names:
        who, _, schedule = name.partition(":")
        line: dict[str, Json] = {
            "variant": name,
            "config": case.config,
            "ranks": case.ranks,
            "microbatches": case.microbatches,
            "transport": (case.transport or "default") if who == "mpar" else "backend",
            "median_ms": round(median_ms(wall[name]), 2),
            "cpu_ms": round(median_ms(cpu[name]), 2),
            "main_cpu_ms": round(median_ms(main_cpu[name]), 2),
        }
        if name != "floor":
            line |= _ratio("cpu_over_floor", cpu[name], cpu["floor"], FLOOR_BAR if who == "mpar" else None)
        if f"torch:{schedule}" in names and who == "mpar":
            line |= _ratio("wall_over_torch", wall[name], wall[f"torch:{schedule}"], wall_bar(schedule, case.ranks))
        if schedule == "zbv" and who == "mpar" and "mpar:one_f_one_b" in names:
            bar = ZBV_BAR if (case.ranks, case.microbatches) == (2, 8) else None
            line |= _ratio("wall_over_one_f_one_b", wall[name], wall["mpar:one_f_one_b"], bar)
        results.append(Result.of(line | about, origin))
    return results


def _of_those_that_have_it(values: Sequence[float]) -> float:
    """The mean loss over ranks that have one; torch has it on the last stage only, and NaN elsewhere."""
    return statistics.fmean(value for value in values if value == value)


Seconds = Sequence[Sequence[float]]
"""By pass, by step."""


def _ratio(key: str, ours: Seconds, theirs: Seconds, bar: float | None) -> dict[str, Json]:
    return {key: paired_ratio(ours, theirs).rounded()} | ({} if bar is None else {f"{key}_bar": bar})


def table(results: Sequence[Result]) -> str:
    """Markdown: one row for each variant."""
    rows = [
        "| ranks | M | schedule | ms | CPU ms | CPU / floor (95 %) | wall / torch (95 %) | zbv / 1F1B, wall (95 %) | foreign |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        case = (result.case[key] for key in ("ranks", "microbatches", "variant"))
        times = (result.figures[key] for key in ("median_ms", "cpu_ms"))
        ratios = [_shown(result, key) for key in ("cpu_over_floor", "wall_over_torch", "wall_over_one_f_one_b")]
        foreign = "/".join(f"{x:.1f}" for x in result.numbers("foreign_cores"))
        rows.append(f"| {' | '.join(str(cell) for cell in (*case, *times, *ratios, foreign))} |")
    return "\n".join(rows) + "\n"


def _shown(result: Result, key: str) -> str:
    if not result.has(key):
        return ""
    values, text = result.numbers(key), interval_text(result.numbers(key))
    if not result.has(f"{key}_bar"):
        return text
    bar = result.number(f"{key}_bar")
    return f"{text} {verdict(values, bar)} {bar}"
