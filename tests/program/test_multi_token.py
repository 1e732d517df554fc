"""Multi-token prediction in whole steps: main loss, loss of further tokens and gradients, simulated, on any mesh."""

import pytest
import torch

from mpar import Mesh, models
from mpar.compiler import Schedule
from mpar.program.compile import compile_step
from mpar.strategy import preset
from tests.program.oracle import DEEPSEEK, Problem, Recorder
from tests.program.test_experts import spread

SHAPE = (8, 16)
ROUTER = {"bias_rate": 0.01, "seq_aux_loss": 0.1}


@pytest.fixture(scope="module")
def packed():
    """Packed rows in two microbatches."""
    return Problem(DEEPSEEK, SHAPE, router=ROUTER, packed=True, num_microbatches=2, mtp_loss_weight=0.3)


@pytest.fixture(scope="module")
def four():
    """Rows of one document in four microbatches, for pipelines."""
    return Problem(DEEPSEEK, SHAPE, router=ROUTER, num_microbatches=4, mtp_loss_weight=0.3)


def compiled(problem, mesh, strategy, schedule=None):
    return compile_step(
        problem.model, Recorder(), mesh, strategy, problem.shapes, num_microbatches=problem.num_microbatches, schedule=schedule
    )


PLACES = {
    "zero3": (Mesh(fsdp=4), "zero3"),
    "tp of a shared stream": (Mesh(tp=2), "tp_sp"),
    "ring in zigzag": (Mesh(cp=2), spread(1, "zero3", context_parallel="ring", sequence="zigzag")),
    "all_to_all with tp": (Mesh(cp=2, tp=2), spread(1, "zero1_tp_sp", context_parallel="all_to_all")),
    "experts over fsdp and cp": (Mesh(fsdp=2, cp=2), spread(4, "zero3")),
    "experts gathered": (Mesh(cp=2), spread(2, "zero3", dispatcher="all_gather")),
}


@pytest.mark.parametrize("place", PLACES)
def test_step_is_exact(place, packed):
    """Both losses, the router's and all gradients are one rank's; the layer reports its experts."""
    metrics = packed.check(compiled(packed, *PLACES[place]))
    assert metrics["mtp.expert_counts"].sum() == 2 * (packed.batch["documents"] != -1).sum()


PIPELINES = {
    "in the last stage": (Mesh(pp=2), "ddp", None),
    "in a stage of its own": (Mesh(pp=2), "ddp", Schedule("interleaved", 2, "Et|t|m|L")),
    "with the embedding": (Mesh(pp=2, fsdp=2), "zero3", Schedule("zbv", None, "E|t|t|mL")),
    "with shared sequences": (Mesh(pp=2, cp=2), spread(2, "zero3"), Schedule("one_f_one_b", None, "Ett|mL")),
}


@pytest.mark.parametrize("place", PIPELINES)
def test_pipelines_are_exact(place, four):
    """A pipeline gives the same, wherever the layer is: it shares the embedding of the first stage and the head of the last."""
    mesh, strategy, schedule = PIPELINES[place]
    program = compiled(four, mesh, strategy, schedule)
    four.check(program)
    stages = program.facts.stage_of
    assert stages["layers.1"] <= stages["mtp"] <= stages["head"]
    if schedule is None:
        assert stages["mtp"] == stages["head"]


def test_weights_of_labels_are_those_of_further_labels():
    """With token_weights a further label weighs as much as where it is the next one."""
    problem = Problem(DEEPSEEK, SHAPE, mtp_loss_weight=0.3)
    weights_BS = torch.rand(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    plain = {key: problem.batch[key] for key in ("tokens", "labels")}
    problem.batch = models.with_next_tokens({**plain, "token_weights": weights_BS})
    masked = problem.batch["next_labels"].clone()
    masked[:, :-1][weights_BS[:, 1:] < 0.5] = -100
    kept_BS = (weights_BS >= 0.5).to(torch.float64)
    problem.differentiate()
    problem.check(compiled(problem, Mesh(cp=2), preset("zero3")))
    problem.batch = models.with_next_tokens({**plain, "token_weights": kept_BS})
    problem.differentiate()
    weighted = problem.losses["mtp_loss"] * kept_BS[plain["labels"] != -100].sum()
    problem.batch = {**models.with_next_tokens(plain), "next_labels": masked}
    problem.differentiate()
    assert torch.isclose(weighted, problem.losses["mtp_loss"] * (plain["labels"] != -100).sum(), rtol=1e-12)
