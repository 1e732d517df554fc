"""What tasks measure of answers, and metrics that are highest values, on many meshes in float64."""

from dataclasses import replace

import pytest

from mpar import Mesh, testing
from mpar.compiler import Schedule
from mpar.program import State, positions_in_order
from mpar.program.compile import compile_forward
from mpar.schedules import layout_letters
from mpar.strategy import preset
from mpar.tasks import Measured, task_means
from tests.meshes import MESHES
from tests.tasks.kinds import problem_of


@pytest.mark.parametrize("name", ["grpo, tokens", "ppo"])
def test_the_largest_gap_is_that_of_all_microbatches(name):
    """However a batch is cut, the highest difference of log-probabilities is that of one token of it."""
    entire, cut = (problem_of(name, MESHES["dp"], num_microbatches=count) for count in (1, 4))
    assert float(entire.metrics["head.gap_highest.highest"]) > float(entire.metrics["head.gap.mean"][0] / 30)
    testing.assert_close(cut.metrics["head.gap_highest.highest"], entire.metrics["head.gap_highest.highest"])
    program = replace(MESHES["dp"], mesh=Mesh()).compile(cut.chain, cut.shapes, num_microbatches=4)
    found = task_means(program.simulate(cut.state(), cut.batch)[1])
    assert found["gap_highest"] == pytest.approx(float(entire.metrics["head.gap_highest.highest"]), rel=1e-12)


@pytest.mark.cases(4)
@pytest.mark.parametrize("place", MESHES)
def test_what_is_measured_is_exact(place):
    """Values and log-probabilities by the reference model, in the order of the rows, on the stages of a step."""
    at, problem = MESHES[place], problem_of("ppo", MESHES[place])
    program = at.compile(problem.chain, problem.shapes)
    chain = Measured(problem.chain.base, problem.chain.task, problem.chain.reference)
    batch = {key: x for key, x in problem.batch.items() if key in chain.batch_axes}
    forwards = [[action for action in actions if action.kind == "F" and not action.microbatch] for actions in program.schedule]
    order = Schedule("forwards", layout=layout_letters(program.facts.stage_of), table=forwards)
    shapes = {key: (tuple(x.shape), x.dtype) for key, x in batch.items()}
    strategy = replace(preset(at.strategy), expert_parallel=at.expert_parallel)
    measuring = compile_forward(chain, at.mesh, strategy, shapes, schedule=order)
    state = problem.state()
    _, results = measuring.simulate(State({leaf.path: state.leaves[leaf.path] for leaf in measuring.state_in}), batch)
    x, context = None, chain.context(batch)
    for segment in chain.segments:
        x, *_ = segment.fn(problem.reads(segment), x, context, training=False)
    assert set(x) == {"values", "reference_logps"}
    for name, expected in x.items():
        testing.assert_close(positions_in_order(measuring, results[name]), expected, name=name)
