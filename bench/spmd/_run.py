"""Passes of one config on one mesh, over one or more launches: losses must be the same; ratios have intervals."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench._losses import largest_spread
from bench._machine import this_run
from bench._passes import Measured, Passes, columns, launched, median_ms
from bench._peers import peer
from bench._result import Json, Result
from bench._statistics import paired_ratio
from bench._workload import MESHES, save_workload
from bench.spmd._bars import BARS

__all__ = ["default_variants", "run", "summarise"]


def default_variants(mesh: str, *, titan: bool) -> list[str]:
    """mpar, mpar on gloo, torch, the floors, and torchtitan's spmd_types where it runs; on one rank mpar and transformers."""
    shape, _ = MESHES[mesh]
    if shape.size == 1:
        return ["mpar", "transformers"]
    names = ["mpar", "mpar_gloo", "torch", "floor_eager", "floor_graph", "floor_direct", "floor_exchanged"]
    return names + (["titan_spmd_types"] if titan and shape.axis_size("tp") == shape.size > 1 else [])


def run(config: str, mesh: str, *, folder: Path, variants: Sequence[str], passes: Passes) -> list[Result]:
    """The results of one config and mesh, one for each variant. Raises LossesDiffer or RankFailed."""
    workload, ranks = peer(folder, "workload"), MESHES[mesh][0].size
    measured = launched(
        ranks,
        "bench.spmd._worker",
        lambda work: save_workload(work, workload.CONFIGS[config], workload, mesh),
        {variant: variant.partition("_")[0] == "mpar" for variant in variants},
        {"peers": folder, "config": config, "mesh": mesh},
        passes,
    )
    return summarise({"config": config, "mesh": mesh, "launches": passes.launches}, measured)


def summarise(facts: Mapping[str, Json], measured: Sequence[Measured]) -> list[Result]:
    """A result for each variant: seconds, CPU seconds, and mpar's ratio to it. A step lasts as long as its slowest rank.

    `facts` are in every result; "config" and "mesh" among them say which bars there are.
    """
    names = list(measured[0]["ranks"][0])
    losses = columns(measured, names, "loss", statistics.fmean)
    wall, cpu = columns(measured, names, "wall", max), columns(measured, names, "cpu", sum)
    main_cpu = columns(measured, names, "main_cpu", sum)
    about = {**facts, "foreign_cores": [p["foreign_cores"] for p in measured], "loss_spread": largest_spread(losses)}
    origin, results = this_run(), []
    for name in names:
        clocks = (("median_ms", wall), ("cpu_ms", cpu), ("main_cpu_ms", main_cpu))
        line: dict[str, Json] = {"variant": name} | {key: round(median_ms(clock[name]), 3) for key, clock in clocks}
        line["last_loss"] = losses[name][0][-1]
        if name != "mpar" and "mpar" in names:
            ratios = {label: paired_ratio(clock["mpar"], clock[name]) for label, clock in (("wall", wall), ("cpu", cpu))}
            line |= {f"mpar_over_this_{label}": ratio.rounded() for label, ratio in ratios.items()}
            line |= {"pairs": ratios["cpu"].count, "passes": ratios["cpu"].passes}
            bar = BARS.get((str(facts["config"]), str(facts["mesh"]), name))
            if bar is not None:
                line |= {"bar": bar, "under_bar": ratios["wall"].rounded()[1] <= bar}
        results.append(Result.of(line | about, origin))
    return results
