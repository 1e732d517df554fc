"""Passes of one config on one mesh, over one or more launches: the same losses demanded, ratios with intervals."""

import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench._launch import launch
from bench._machine import machine
from bench._peers import peer
from bench._statistics import paired_ratio
from bench._workload import MESHES, save_workload
from bench.spmd._bars import BARS

__all__ = ["LOSS_TOLERANCE", "LossesDiffer", "check_losses", "default_variants", "run", "summarise"]

LOSS_TOLERANCE = 1e-5


class LossesDiffer(Exception):
    """Two variants did not train the same model."""


def default_variants(mesh: str, *, titan: bool) -> list[str]:
    """mpar, mpar on gloo, torch, the floors, and torchtitan's spmd_types where it runs; of one rank transformers."""
    shape, _ = MESHES[mesh]
    if shape.size == 1:
        return ["mpar", "transformers"]
    names = ["mpar", "mpar_gloo", "torch", "floor_eager", "floor_graph", "floor_direct", "floor_exchanged"]
    return names + (["titan_spmd_types"] if titan and shape.axis_size("tp") == shape.size > 1 else [])


def check_losses(mean_losses: dict[str, Sequence[float]]) -> float:
    """The largest relative difference between variants over all steps. Raises LossesDiffer beyond LOSS_TOLERANCE."""
    names = [name for name in mean_losses if not name.startswith("floor")]
    worst = 0.0
    for index, values in enumerate(zip(*(mean_losses[name] for name in names), strict=True)):
        spread = (max(values) - min(values)) / abs(values[0])
        if not spread <= LOSS_TOLERANCE:
            shown = "\n".join(f"  {name:20s} {value:.7f}" for name, value in zip(names, values, strict=True))
            raise LossesDiffer(
                f"step {index}: losses differ by {spread:.2e}, more than {LOSS_TOLERANCE:.0e} of the first:\n{shown}"
            )
        worst = max(worst, spread)
    return worst


def run(
    config: str, mesh: str, *, folder: Path, variants: Sequence[str], passes: int, launches: int, steps: int, warmup: int
) -> list[dict[str, Any]]:
    """The lines of one config and mesh, one for each variant. Raises LossesDiffer or RankFailed."""
    workload = peer(folder, "workload")
    with tempfile.TemporaryDirectory() as work:
        program = save_workload(Path(work), workload.CONFIGS[config], workload, mesh)
        args = ["--work", work, "--peers", str(folder), "--config", config, "--mesh", mesh]
        args += ["--variants", ",".join(variants), "--steps", str(steps), "--warmup", str(warmup)]
        args += ["--passes", str(-(-passes // launches))]
        printed = [launch(program.mesh.size, "bench.spmd._worker", args) for _ in range(launches)]
    measured = [json.loads(line) for text in printed for line in text.splitlines()]
    return [line | {"launches": launches} for line in summarise(config, mesh, measured)]


def summarise(config: str, mesh: str, measured: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line a variant: seconds, CPU seconds, and mpar's ratio to it. A step lasts as long as its slowest rank."""
    names = list(measured[0]["ranks"][0])

    def columns(name: str, key: str, over_ranks: Any) -> list[list[float]]:
        return [[over_ranks(values) for values in zip(*(rank[name][key] for rank in p["ranks"]), strict=True)] for p in measured]

    losses = {name: columns(name, "loss", statistics.fmean) for name in names}
    spread = max(check_losses({name: losses[name][i] for name in names}) for i in range(len(measured)))
    wall, cpu, main = (
        {name: columns(name, key, over) for name in names} for key, over in (("wall", max), ("cpu", sum), ("main_cpu", sum))
    )
    facts = machine() | {
        "config": config,
        "mesh": mesh,
        "foreign_cores": [p["foreign_cores"] for p in measured],
        "loss_spread": spread,
    }
    lines = []
    for name in names:
        line: dict[str, Any] = {
            "variant": name,
            "median_ms": round(1e3 * statistics.median(x for p in wall[name] for x in p), 3),
            "cpu_ms": round(1e3 * statistics.median(x for p in cpu[name] for x in p), 3),
            "main_cpu_ms": round(1e3 * statistics.median(x for p in main[name] for x in p), 3),
            "last_loss": losses[name][0][-1],
        }
        if name != "mpar" and "mpar" in names:
            for label, table in (("wall", wall), ("cpu", cpu)):
                ratio = paired_ratio(table["mpar"], table[name])
                line[f"mpar_over_this_{label}"] = [round(x, 4) for x in (ratio.median, ratio.low, ratio.high)]
                line["pairs"], line["passes"] = ratio.count, ratio.passes
            bar = BARS.get((config, mesh, name))
            if bar is not None:
                line["bar"], line["under_bar"] = bar, line["mpar_over_this_wall"][1] <= bar
        lines.append(line | facts)
    return lines
