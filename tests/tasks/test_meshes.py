"""A step with a task, simulated on many meshes in float64: loss, metrics and gradients are those of one rank."""

import pytest

from mpar import Mesh
from mpar.compiler import Schedule
from mpar.program.compile import compile_step
from mpar.strategy import preset
from mpar.tasks import Dpo
from tests.tasks.problem import Problem, Recorder

PLACES = {
    "tp of a shared stream": (Mesh(tp=2), "tp_sp", None),
    "zero3": (Mesh(fsdp=4), "zero3", None),
    "ring in zigzag": (Mesh(cp=2), "zero3", None),
    "pipeline": (Mesh(pp=2), "ddp", Schedule("zbv", None, "E|t|t|L")),
}


def compiled(problem, mesh, strategy, schedule=None):
    strategy = preset(strategy) if isinstance(strategy, str) else strategy
    return compile_step(
        problem.chain,
        Recorder(),
        mesh,
        strategy,
        problem.shapes,
        num_microbatches=problem.num_microbatches,
        schedule=schedule,
    )


@pytest.mark.parametrize("place", PLACES)
def test_dpo_with_columns_is_exact(place):
    """Pairs with log-probabilities of the reference model in the batch, in microbatches where there is a pipeline."""
    mesh, strategy, schedule = PLACES[place]
    problem = Problem(Dpo(reference="columns", ld_alpha=0.5, beta="data"), num_microbatches=4 if schedule else 1)
    problem.check(compiled(problem, mesh, strategy, schedule))
