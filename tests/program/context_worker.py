"""One of four processes: trains small models whose sequences and experts ranks share.

usage: torchrun --nproc-per-node 4 context_worker.py OUT
"""

import pathlib
import sys
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from mpar import models
from mpar.mesh import Mesh
from mpar.optim import AdamW
from mpar.program import Program, State, batch_rows
from mpar.program.compile import compile_step
from mpar.runtime import Counter
from mpar.strategy import preset
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
SHAPE, NUM_STEPS = (4, 16), 20


def make_batches() -> list[dict[str, torch.Tensor]]:
    """Random tokens and labels, some of which do not count."""
    generator, out = torch.Generator().manual_seed(0), []
    for _ in range(NUM_STEPS):
        tokens, labels = (torch.randint(0, VOCAB, SHAPE, generator=generator) for _ in range(2))
        labels[torch.rand(SHAPE, generator=generator) < 0.2] = -100
        out.append({"tokens": tokens, "labels": labels})
    return out


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


def main(out: str) -> None:
    """Train every case; rank 0 saves losses, norms, messages of one step and the parameters at the end."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, results = dist.get_rank(), {}
    for case in CASES:
        program, counter = make_program(case), Counter()
        state: State = program.init_state(make_params(case), rank)
        run = program.bind(counter=counter, transport=CASES[case][-1])
        losses, norms = [], []
        for batch in make_batches():
            counter.messages.clear()
            state, metrics = run(state, batch_rows(program, batch, rank))
            losses.append(metrics["loss"])
            norms.append(metrics["grad_norm"])
        results[case] = {
            "losses": torch.stack(losses),
            "norms": torch.stack(norms),
            "messages": counter.messages,
            "leaves": state.leaves,
        }
    if rank == 0:
        torch.save(results, out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
