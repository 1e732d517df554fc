"""Run: our programs of a subject beside torch's in the same processes, step by step in turn."""

import pickle
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from bench._losses import largest_spread
from bench._machine import this_run
from bench._passes import Measured, Passes, columns, launched, median_ms
from bench._peers import peer
from bench._result import Json, Result
from bench._statistics import paired_ratio
from bench._workload import peers_optimizer
from bench.parallel._subject import OURS, Sizes, Subject
from bench.parallel._worker import program_file
from mpar.program.compile import compile_step

__all__ = ["run", "summarise"]


def run(
    subject: Subject, config: str, sizes: Sizes, ranks: int, variants: Sequence[str], *, folder: Path, passes: Passes
) -> list[Result]:
    """Measure the peers' `config` at these sizes: a result for each variant. Raises LossesDiffer or RankFailed."""
    workload = peer(folder, "workload")
    cfg = subject.config(workload.CONFIGS[config], sizes)

    def save(work: Path) -> None:
        model, optimizer = subject.model(workload, cfg), peers_optimizer(workload)
        for method in {variant.partition(":")[2] for variant in variants if variant.partition(":")[0] in OURS}:
            plan = subject.plan(method, ranks)
            shape = (cfg.batch, cfg.seq)
            program = compile_step(model, optimizer, plan.mesh, plan.strategy, shape, num_slices=plan.num_slices)
            (work / program_file(method)).write_bytes(pickle.dumps(program))
        torch.save(dict(subject.params(workload, cfg)), work / "params.pt")

    named = {variant: variant.partition(":")[0] in OURS for variant in variants}
    arguments = {"subject": subject.name, "peers": folder, "config": config, **sizes}
    measured = launched(ranks, "bench.parallel._worker", save, named, arguments, passes)
    facts = {"bench": subject.name, "ranks": ranks, "config": subject.label(config, sizes), "launches": passes.launches}
    return summarise(measured, subject.pairs, facts)


def summarise(measured: Sequence[Measured], pairs: Mapping[str, Sequence[str]], facts: Mapping[str, Json]) -> list[Result]:
    """A result for each variant; `pairs` maps ours to the peers that they are compared with. Raises LossesDiffer."""
    names = list(measured[0]["ranks"][0])
    losses = columns(measured, names, "loss", statistics.fmean)
    clocks = {"wall": columns(measured, names, "wall", max), "cpu": columns(measured, names, "cpu", sum)}
    about = {**facts, "loss_spread": largest_spread(losses), "foreign_cores": [p["foreign_cores"] for p in measured]}
    origin, results = this_run(), []
    for name in names:
        line: dict[str, Json] = {
            "variant": name,
            "median_ms": round(median_ms(clocks["wall"][name]), 3),
            "cpu_ms": round(median_ms(clocks["cpu"][name]), 3),
            "last_loss": losses[name][0][-1],
        }
        over: dict[str, Json] = {}
        for theirs in (other for other in pairs.get(name, ()) if other in names):
            ratios = {key: paired_ratio(clock[name], clock[theirs]) for key, clock in clocks.items()}
            over[theirs] = {key: ratio.rounded() for key, ratio in ratios.items()}
            line |= {"pairs": ratios["cpu"].count, "passes": ratios["cpu"].passes}
        results.append(Result.of(line | {"over": over} | about, origin))
    return results
