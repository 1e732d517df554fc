"""Steps of a model with experts, spread over ranks, on gloo."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from bench._beside import OURS, launched, save_program, summarise
from bench._peers import peer
from bench.experts._case import PAIRS, Sizes, sizes
from bench.experts._torch import build
from mpar import models
from mpar.mesh import Mesh
from mpar.strategy import preset

__all__ = ["initial_params", "run"]


def initial_params(workload: ModuleType, cfg: Sizes) -> dict[str, Tensor]:
    """The peer's first weights by mpar's paths."""
    theirs = {name: p.detach() for name, p in build(workload, cfg).named_parameters()}
    heads = (-1, cfg.head_dim)
    ours = {"embed.table_VD": theirs["embed_tokens.weight"], "head.norm_D": theirs["norm.weight"]}
    ours["head.head_DV"] = theirs["lm_head.weight"].T
    for i in range(cfg.layers):
        from_, to = f"layers.{i}", f"layers.{i}"
        for name, dims in (("q", "DNH"), ("k", "DKH"), ("v", "DKH")):
            ours[f"{to}.attention.{name}_{dims}"] = theirs[f"{from_}.self_attn.{name}_proj.weight"].T.unflatten(1, heads)
        ours[f"{to}.attention.o_NHD"] = theirs[f"{from_}.self_attn.o_proj.weight"].T.unflatten(0, heads)
        ours[f"{to}.attn_norm_D"] = theirs[f"{from_}.input_layernorm.weight"]
        ours[f"{to}.mlp_norm_D"] = theirs[f"{from_}.post_attention_layernorm.weight"]
        ours[f"{to}.mlp.router_DE"] = theirs[f"{from_}.mlp.router.weight"].T
        for name, dims in (("gate", "EDF"), ("up", "EDF"), ("down", "EFD")):
            ours[f"{to}.mlp.{name}_{dims}"] = theirs[f"{from_}.mlp.{name}"]
    return {path: value.contiguous() for path, value in ours.items()}


def run(
    config: str,
    experts: int,
    top_k: int,
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
    cfg = sizes(workload.CONFIGS[config], experts, top_k)

    def save(work: Path) -> None:
        model = models.from_config(cfg.hf_config(workload.NORM_EPS, workload.ROPE_THETA))
        for dispatcher in {name.partition(":")[2] for name in variants if name.partition(":")[0] in OURS}:
            strategy = replace(preset("ddp"), expert_parallel=ranks, dispatcher=dispatcher)
            save_program(work / f"{dispatcher}.pickle", model, Mesh(dp=ranks), strategy, cfg, workload.CLIP)
        torch.save(initial_params(workload, cfg), work / "params.pt")

    arguments = {"peers": folder, "config": config, "variants": ",".join(variants), "experts": experts, "top-k": top_k}
    arguments |= {"steps": steps, "warmup": warmup}
    measured = launched(ranks, "bench.experts._worker", save, arguments, passes, launches)
    shown = f"{config}, {experts} experts, top {top_k}"
    return summarise(measured, PAIRS, {"bench": "experts", "ranks": ranks, "config": shown, "launches": launches})
