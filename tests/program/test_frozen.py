"""Frozen parameters: a step is torch.autograd's without them, and nothing is computed, sent or kept for what no trained one needs."""

import functools

import pytest
import torch

from mpar import Mesh, models
from mpar.compiler import RecomputePolicy, Schedule
from mpar.optim import AdamW
from mpar.program import Program
from mpar.program.compile import compile_step
from tests.program.oracle import BASE, DEEPSEEK, MOE, Problem, Recorder

pytestmark = pytest.mark.cases(2)  # each compiles a program of its own
SHAPE = (16, 8)
MASKS = {
    "embedding only": {"names": ["*"], "trainable": ["embed"]},
    "second half": {"segments": ["embed", "layers.[01]"]},
    "norms only": {"names": ["*"], "trainable": ["*norm*"]},
    "head only": {"names": ["*"], "trainable": ["lm_head"]},
    "one matrix of a layer": {"names": ["*"], "trainable": ["*.o_proj.weight"]},
}
MODELS = {
    "llama": {**BASE, "model_type": "llama", "num_hidden_layers": 4},
    "experts": {**MOE, "num_hidden_layers": 4},
    "experts with biases": {**DEEPSEEK, "num_hidden_layers": 4},
}


@functools.cache
def problem(model: str, mask: str, packed: bool = False) -> Problem:
    """The problem of a model, with this mask."""
    router = {"bias_rate": 0.01} if model == "experts with biases" else None
    return Problem(MODELS[model], SHAPE, router=router, num_microbatches=4, packed=packed).freeze(**MASKS[mask])


def compiled(found: Problem, mesh: Mesh, strategy: str, schedule: Schedule | str | None = None, **options) -> Program:
    return compile_step(
        found.model, Recorder(), mesh, strategy, found.shapes, num_microbatches=4, schedule=schedule, **options
    )


CASES = [
    ("llama", Mesh(dp=4), "ddp", None, {}),
    ("llama", Mesh(fsdp=4), "zero2", None, {}),
    ("llama", Mesh(dp=2, fsdp=2), "zero3", None, {"recompute": "selective"}),
    ("llama", Mesh(fsdp=2, tp=2), "zero3_tp_sp", None, {}),
    ("llama", Mesh(tp=4), "tp_sp", None, {"recompute": "full"}),
    ("llama", Mesh(cp=4), "ddp", None, {}),
    ("llama", Mesh(), "ddp", None, {"num_slices": 4}),
    ("llama", Mesh(fsdp=2), "zero3", None, {"num_slices": 2, "recompute": RecomputePolicy("full", offload=True)}),
    ("llama", Mesh(pp=2, dp=2), "ddp", "one_f_one_b", {}),
    ("llama", Mesh(pp=4), "ddp", "one_f_one_b", {}),
    ("llama", Mesh(pp=2, fsdp=2), "zero3", "zbv", {}),
    ("llama", Mesh(pp=2), "ddp", Schedule("zb1p", num_chunks=2), {}),
    ("llama", Mesh(pp=2, tp=2), "tp_sp", Schedule("interleaved", num_chunks=2), {}),
    ("llama", Mesh(pp=2), "ddp", "dual_pipe", {}),
    ("llama", Mesh(pp=2), "ddp", "zb_h1", {"num_slices": 2}),
    ("experts", Mesh(dp=2, fsdp=2), "zero3", None, {}),
    ("experts", Mesh(pp=2, tp=2), "tp_sp", "zbv", {}),
    ("experts with biases", Mesh(pp=2, dp=2), "ddp", "one_f_one_b", {}),
]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_step_is_exact(case, mask):
    """Loss, gradients of what is trained and their norm are torch's, and what is frozen keeps its bits."""
    model, mesh, strategy, schedule, options = case
    found = problem(model, mask)
    found.check(compiled(found, mesh, strategy, schedule, **options))
