"""One rank of a launch: the variants of one config and mesh take one step each in turn. Rank 0 prints the times."""

import contextlib
import io
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from bench._rank import load_step
from bench._turns import Rank, joined, run_passes

__all__ = ["main"]


def make_variants(rank: Rank) -> dict[str, Callable[[], torch.Tensor]]:
    """For each variant, by name, the function that takes its next step."""
    workload, mesh = rank.workload, rank.args.mesh
    cfg = workload.CONFIGS[rank.args.config]
    steps = {}
    for name in rank.variants:
        kind, _, mode = name.partition("_")
        if kind == "mpar":
            steps[name] = load_step(rank.work, workload, cfg, rank.rank, "backend" if mode == "gloo" else None)
        elif kind == "transformers":
            steps[name] = transformers_step(rank.peer("hf_eager"), workload, cfg)
        elif kind == "torch":
            steps[name] = rank.peer("torch_spmd").make_step(cfg, mesh)
        elif kind == "titan":  # last, since importing it patches torch
            with contextlib.redirect_stderr(io.StringIO()):
                steps[name] = rank.peer("torchtitan_cpu").make_step(cfg, mesh, mode, False)
        else:
            steps[name] = rank.peer("floor").make_step(cfg, mesh, mode)
    return steps


def transformers_step(hf_eager: ModuleType, workload: ModuleType, cfg: Any) -> Callable[[], torch.Tensor]:
    """The step that the peer `hf_eager` takes."""
    model = hf_eager.build(cfg)
    optimizer, data = workload.adamw(model.parameters()), workload.batches(cfg)

    def step() -> torch.Tensor:
        tokens, labels = next(data)
        loss = workload.cross_entropy(model(input_ids=tokens).logits, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), workload.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def main() -> None:
    """Entry of one rank."""
    rank = joined(texts=["mesh"])
    run_passes(make_variants(rank), rank)


if __name__ == "__main__":
    main()
