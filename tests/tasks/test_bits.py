"""Tasks and adapters in bits: the same under every schedule, and on four processes those of the simulation."""

import pathlib
from typing import Any

import pytest
import torch

from mpar import Mesh
from mpar.compiler import Schedule
from mpar.program.compile import compile_step
from tests.adapters import kinds as of_adapters
from tests.gloo_training import assert_bits_equal, launch, simulate
from tests.meshes import MESHES, in_four_stages
from tests.program.oracle import Recorder
from tests.tasks import kinds as of_tasks
from tests.tasks.gloo_worker import NUM_STEPS
from tests.tiers import values_asked_for

SCHEDULES = {
    "gpipe": Schedule("gpipe"),
    "one_f_one_b": Schedule("one_f_one_b"),
    "interleaved": in_four_stages("interleaved"),
    "looped_bfs": in_four_stages("looped_bfs"),
    "zb_h1": Schedule("zb_h1"),
    "zbv": in_four_stages("zbv"),
    "v_half": in_four_stages("v_half"),
}
CASES = (
    "dpo, every loss",
    "dpo, adapter off",
    "kto",
    "reward",
    "grpo, tokens",
    "ppo",
    "gkd",
    "dropout",
    "rslora, dora, dropout",
    "nf4, dropout",
)
PLACES = {
    "dpo, every loss": "pp fsdp",
    "kto": "dp fsdp",
    "reward": "cp tp sp",
    "grpo, tokens": "fsdp tp sp",
    "ppo": "dp fsdp",
    "gkd": "pp fsdp",
    "rslora, dora, dropout": "fsdp tp sp",
    "dropout": "ep cp",
    "nf4, dropout": "pp fsdp",
}
"""One case of each sort of task and adapter for four processes."""


def problem_of(case: str, place: str) -> Any:
    return (of_tasks if case in of_tasks.TASKS else of_adapters).problem_of(case, MESHES[place])


@pytest.fixture(autouse=True)
def one_thread():
    """Sums in one order, as in the processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_share_bits(schedule, case):
    """Losses, gradients and new parameters of a step in two microbatches are, bit for bit, those of one stage."""
    problem = problem_of(case, "pp zbv")
    found, expected = (
        compile_step(problem.chain, Recorder(), mesh, "ddp", problem.shapes, num_microbatches=2, schedule=order).simulate(
            problem.state(), problem.batch
        )
        for mesh, order in ((Mesh(pp=2), SCHEDULES[schedule]), (Mesh(), None))
    )
    assert found[1].keys() == expected[1].keys()
    different = [name for name, value in expected[1].items() if not torch.equal(found[1][name], value)]
    different += [path for path, leaf in expected[0].leaves.items() if not torch.equal(found[0].leaves[path], leaf)]
    assert not different


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """What rank 0 found for the cases of the selected tests, from one launch of four processes."""
    folder, programs = tmp_path_factory.mktemp("gloo"), {}
    for case in values_asked_for(request, PLACES):
        problem = problem_of(case, PLACES[case])
        programs[case] = MESHES[PLACES[case]].compile(problem.chain, problem.shapes)
        torch.save((problem.params, problem.batch), folder / f"{case}.inputs")
    return programs, launch(pathlib.Path(__file__).with_name("gloo_worker.py"), folder, programs)


@pytest.mark.gloo
@pytest.mark.parametrize("case", PLACES)
def test_four_processes_have_the_bits_of_the_simulation(case, runs):
    """Losses, gradient norms and the state after two steps."""
    programs, found = runs
    problem, program = problem_of(case, PLACES[case]), programs[case]
    batches = [problem.batch] * NUM_STEPS
    expected, state = simulate(program, program.init_state(problem.params), batches)
    assert_bits_equal(found[case], program, expected, state)
