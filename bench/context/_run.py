"""Steps of a dense model whose sequence is spread over ranks, on gloo."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench._beside import OURS, launched, save_program, summarise
from bench._peers import peer
from bench._workload import build_model, initial_params
from bench.context._case import PAIRS, sized
from mpar.mesh import Mesh
from mpar.strategy import preset

__all__ = ["run"]


def run(
    config: str,
    seq: int,
    batch: int,
    ranks: int,
    variants: Sequence[str],
    *,
    folder: Path,
    passes: int,
    launches: int,
    steps: int,
    warmup: int,
) -> list[dict[str, Any]]:
    """One line for each variant. Raises LossesDiffer or RankFailed."""
    workload = peer(folder, "workload")
    cfg = sized(workload.CONFIGS[config], seq, batch)

    def save(work: Path) -> None:
        model = build_model(cfg, workload)
        for name in {name.partition(":")[2] for name in variants if name.partition(":")[0] in OURS}:
            method, _, slices = name.partition("/")
            strategy = replace(preset("ddp"), context_parallel=method)
            how = {"num_slices": int(slices or 1)}
            save_program(work / f"{name.replace('/', ' ')}.pickle", model, Mesh(cp=ranks), strategy, cfg, workload.CLIP, **how)
        torch.save(initial_params(cfg, workload), work / "params.pt")

    arguments = {"peers": folder, "config": config, "variants": ",".join(variants), "seq": seq, "batch": batch}
    arguments |= {"steps": steps, "warmup": warmup}
    measured = launched(ranks, "bench.context._worker", save, arguments, passes, launches)
    facts = {"bench": "context", "ranks": ranks, "config": f"{config}, {batch} x {seq}", "launches": launches}
    return summarise(measured, PAIRS, facts)
