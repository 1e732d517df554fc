"""One of four processes: trains small models whose sequences and experts ranks share.

usage: torchrun --nproc-per-node 4 context_worker.py FOLDER
"""

import pathlib
import sys
from dataclasses import replace
from typing import Any

import torch

from mpar import models
from mpar.mesh import Mesh
from mpar.optim import AdamW
from mpar.program import Program
from mpar.program.compile import compile_step
from mpar.strategy import preset
from tests.gloo_training import random_batches, train_cases
from tests.program.oracle import BASE, DEEPSEEK, MOE, VOCAB

BOTH, RING = Mesh(dp=2, cp=2), {"context_parallel": "ring"}
QWEN3, BALANCED = {**BASE, "model_type": "qwen3"}, {"kind": "balanced"}
ROUTED = {**MOE, "router_aux_loss_coef": 0.1}
F32, F64 = torch.float32, torch.float64
CASES: dict[str, tuple[dict, Any, torch.dtype, Mesh, dict, str | None]] = {
    "qwen3_moe": (ROUTED, None, F64, BOTH, {**RING, "expert_parallel": 4}, None),
    "qwen3_moe_forced": (ROUTED, BALANCED, F32, BOTH, {**RING, "expert_parallel": 4}, "backend"),
    "deepseek_v3": (DEEPSEEK, {"bias_rate": 0.01}, F64, BOTH, {**RING, "expert_parallel": 4}, "backend"),
    "ring": (QWEN3, None, F64, Mesh(cp=4), RING, "backend"),
    "all_to_all": (QWEN3, None, F64, Mesh(cp=4), {"context_parallel": "all_to_all"}, None),
    "two_levels": (QWEN3, None, F64, Mesh(cp=4), {"context_parallel": "all_to_all+ring"}, None),
    "slices": (QWEN3, None, F64, BOTH, RING, "backend"),
}
SLICES = {"slices": 2}
OPTIMIZER = AdamW(lr=3e-3, clip_norm=1.0)
SHAPE = (4, 16)
BATCHES = random_batches(20, SHAPE, VOCAB)


def make_program(case: str, *, one_rank: bool = False) -> Program:
    """The program of a case, or of the same model on one rank."""
    config, router, dtype, mesh, options, _ = CASES[case]
    model = models.from_config(config, dtype=dtype, vocab_multiple=8, router=router)
    strategy = preset("ddp") if one_rank else replace(preset("ddp"), **options)
    num_slices = 1 if one_rank else SLICES.get(case, 1)
    return compile_step(model, OPTIMIZER, Mesh() if one_rank else mesh, strategy, SHAPE, num_slices=num_slices)


def make_params(case: str) -> Any:
    """Parameters large enough for scores to differ."""
    config, router, dtype, *_ = CASES[case]
    config = {**config, "initializer_range": 0.2}
    return models.from_config(config, dtype=dtype, vocab_multiple=8, router=router).init(0)


if __name__ == "__main__":
    train_cases(pathlib.Path(sys.argv[1]), make_params, lambda case: CASES[case][-1], lambda case: BATCHES)
