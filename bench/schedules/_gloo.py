"""Steps of pipelines on gloo: every schedule beside torch's and the floor, in the same processes; ratios with intervals."""

import json
import pickle
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from bench._launch import launch
from bench._machine import machine
from bench._peers import peer
from bench._statistics import paired_ratio
from bench._workload import build_model, initial_params
from bench.schedules._names import FLOOR_BAR, TORCH, ZBV_BAR, wall_bar
from bench.spmd._run import check_losses
from mpar.mesh import Mesh
from mpar.optim import AdamW
from mpar.program.compile import compile_step

__all__ = ["run", "table"]


def run(
    config: str,
    ranks: int,
    microbatches: int,
    schedules: Sequence[str],
    *,
    folder: Path,
    passes: int,
    launches: int,
    steps: int,
    warmup: int,
    transport: str | None,
) -> list[dict[str, Any]]:
    """The lines of one number of ranks and microbatches, one for each variant. Raises LossesDiffer or RankFailed."""
    workload = peer(folder, "workload")
    cfg = workload.CONFIGS[config]
    cfg = replace(cfg, batch=max(cfg.batch, microbatches))
    variants = [f"mpar:{s}" for s in schedules] + [f"torch:{s}" for s in schedules if s in TORCH] + ["floor"]
    with tempfile.TemporaryDirectory() as work:
        _save(Path(work), cfg, workload, ranks, microbatches, schedules)
        args = ["--work", work, "--peers", str(folder), "--config", config, "--variants", ",".join(variants)]
        args += ["--microbatches", str(microbatches), "--steps", str(steps), "--warmup", str(warmup)]
        args += ["--passes", str(-(-passes // launches)), *(["--transport", transport] if transport else [])]
        printed = [launch(ranks, "bench.schedules._worker", args) for _ in range(launches)]
    measured = [json.loads(line) for text in printed for line in text.splitlines()]
    return _summarise(config, ranks, microbatches, transport or "default", launches, measured)


def _save(folder: Path, cfg: Any, workload: ModuleType, ranks: int, microbatches: int, schedules: Sequence[str]) -> None:
    optimizer = AdamW(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, decay="all", clip_norm=workload.CLIP)
    model = build_model(cfg, workload)
    for name in schedules:
        program = compile_step(
            model, optimizer, Mesh(pp=ranks), "ddp", (cfg.batch, cfg.seq), num_microbatches=microbatches, schedule=name
        )
        (folder / f"{name}.pickle").write_bytes(pickle.dumps(program))
    torch.save(initial_params(cfg, workload), folder / "params.pt")


def _summarise(
    config: str, ranks: int, microbatches: int, transport: str, launches: int, measured: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    names = list(measured[0]["ranks"][0])

    def columns(name: str, key: str, over_ranks: Any) -> list[list[float]]:
        return [[over_ranks(values) for values in zip(*(rank[name][key] for rank in p["ranks"]), strict=True)] for p in measured]

    losses = {name: columns(name, "loss", _of_those_that_have_it) for name in names if name != "floor"}
    spread = max(check_losses({name: passes[i] for name, passes in losses.items()}) for i in range(len(measured)))
    wall = {name: columns(name, "wall", max) for name in names}
    cpu = {name: columns(name, "cpu", sum) for name in names}
    lines = []
    for name in names:
        who, _, schedule = name.partition(":")
        line: dict[str, Any] = {
            "variant": name,
            "config": config,
            "ranks": ranks,
            "microbatches": microbatches,
            "transport": transport if who == "mpar" else "backend",
            "median_ms": round(1e3 * statistics.median(x for p in wall[name] for x in p), 2),
            "cpu_ms": round(1e3 * statistics.median(x for p in cpu[name] for x in p), 2),
            "main_cpu_ms": round(1e3 * statistics.median(x for p in columns(name, "main_cpu", sum) for x in p), 2),
        }
        if name != "floor":
            _ratio(line, "cpu_over_floor", cpu[name], cpu["floor"], FLOOR_BAR if who == "mpar" else None)
        if f"torch:{schedule}" in names and who == "mpar":
            _ratio(line, "wall_over_torch", wall[name], wall[f"torch:{schedule}"], wall_bar(schedule, ranks))
        if schedule == "zbv" and who == "mpar" and "mpar:one_f_one_b" in names:
            bar = ZBV_BAR if (ranks, microbatches) == (2, 8) else None
            _ratio(line, "wall_over_one_f_one_b", wall[name], wall["mpar:one_f_one_b"], bar)
        line |= {"launches": launches, "foreign_cores": [p["foreign_cores"] for p in measured], "loss_spread": spread}
        lines.append(line | machine())
    return lines


def _of_those_that_have_it(values: Sequence[float]) -> float:
    """The loss; torch has it on the last stage only, NaN elsewhere."""
    return statistics.fmean(value for value in values if value == value)


def _ratio(line: dict[str, Any], key: str, ours: Any, theirs: Any, bar: float | None) -> None:
    ratio = paired_ratio(ours, theirs)
    line[key] = [round(x, 4) for x in (ratio.median, ratio.low, ratio.high)]
    if bar is not None:
        line[f"{key}_bar"] = bar


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Markdown: one row for each variant."""
    rows = [
        "| ranks | M | schedule | ms | CPU ms | CPU / floor (95 %) | wall / torch (95 %) | zbv / 1F1B, wall (95 %) | foreign |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        ratios = [_shown(line, key) for key in ("cpu_over_floor", "wall_over_torch", "wall_over_one_f_one_b")]
        foreign = "/".join(f"{x:.1f}" for x in line["foreign_cores"])
        cells = (line["ranks"], line["microbatches"], line["variant"], line["median_ms"], line["cpu_ms"], *ratios, foreign)
        rows.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    return "\n".join(rows) + "\n"


def _shown(line: dict[str, Any], key: str) -> str:
    if key not in line:
        return ""
    median, low, high = line[key]
    text = f"{median:.3f} ({low:.3f} to {high:.3f})"
    bar = line.get(f"{key}_bar")
    return text if bar is None else f"{text} {'met' if high <= bar else 'straddled' if low <= bar else '**missed**'} {bar}"
