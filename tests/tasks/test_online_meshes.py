"""A step with GRPO, simulated on many meshes in float64: loss, metrics and gradients are those of one rank."""

import pytest
import torch
from torch import Tensor

from mpar import Mesh
from mpar.program.compile import compile_step
from mpar.strategy import preset
from mpar.tasks import Grpo, Task
from tests.program.oracle import MOE
from tests.tasks.problem import QWEN3, Problem, Recorder, answers_batch

PLACES = {
    "dp": (Mesh(dp=4), "ddp", None, QWEN3),
    "zero3": (Mesh(fsdp=4), "zero3", None, QWEN3),
    "tp and fsdp": (Mesh(fsdp=2, tp=2), "zero3_tp_sp", None, QWEN3),
    "ring in zigzag": (Mesh(cp=2), "zero3", None, QWEN3),
    "pipeline": (Mesh(pp=2), "ddp", "one_f_one_b", QWEN3),
    "experts": (Mesh(fsdp=2, tp=2), "zero3_tp_sp", None, MOE),
}


def online_batch() -> dict[str, Tensor]:
    """Answers with log-probabilities near those of a model of small numbers, and advantages."""
    batch = answers_batch()
    generator = torch.Generator().manual_seed(9)
    old = torch.randn(batch["tokens"].shape, generator=generator, dtype=torch.float64) - 4
    batch["old_logps"] = torch.where(batch["answers"] >= 0, old, 0.0)
    columns = torch.randn(batch["signs"].shape, generator=generator, dtype=torch.float64)
    return {**batch, "advantages": torch.where(batch["signs"] >= 0, columns, 0.0)}


def check(task: Task, place: str, *, reference: bool = False) -> Problem:
    mesh, strategy, schedule, config = PLACES[place]
    problem = Problem(task, config=config, reference=reference, num_microbatches=4 if schedule else 1, batch=online_batch())
    program = compile_step(
        problem.chain,
        Recorder(),
        mesh,
        preset(strategy),
        problem.shapes,
        num_microbatches=problem.num_microbatches,
        schedule=schedule,
    )
    problem.check(program)
    return problem


@pytest.mark.parametrize("place", PLACES)
def test_grpo_is_exact(place):
    """With ratios of answers, and means over answers."""
    task = Grpo(loss_type="grpo", ratio="sequence")
    problem = check(task, place)
    assert problem.losses["loss"] != 0


def test_grpo_beside_a_reference_model_is_exact():
    """The divergence from a frozen copy in the same program, weighed by the ratio of each token."""
    problem = check(Grpo(beta=0.1, weigh_kl=True, epsilon_high=0.3), "tp and fsdp", reference=True)
    assert float(problem.metrics["head.kl.mean"][0]) > 0
