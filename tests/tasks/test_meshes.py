"""A step with a task, simulated on many meshes in float64: loss, metrics and gradients are those of one rank."""

import pytest

from mpar import testing
from mpar.program.compile import compile_forward
from mpar.strategy import preset
from mpar.tasks import AnswerLogps, Dpo
from tests.meshes import MESHES
from tests.tasks.kinds import OFF, TASKS, full_batch, problem_of, with_adapter
from tests.tasks.problem import Problem


@pytest.mark.cases(4)
@pytest.mark.parametrize("place", MESHES)
@pytest.mark.parametrize("name", TASKS)
def test_step_is_exact(name, place):
    """Loss, metrics and gradients of every task on every mesh; stages take two microbatches of two rows."""
    problem = problem_of(name, MESHES[place])
    problem.check(MESHES[place].compile(problem.chain, problem.shapes))


def test_chunks_of_logits():
    """Logits of eight labels at a time give the same."""
    problem = problem_of("dpo, columns", MESHES["dp"], logits_chunk=8)
    problem.check(MESHES["dp"].compile(problem.chain, problem.shapes))


@pytest.mark.parametrize("name", [name for name in TASKS if name != "kto"])
def test_microbatches_change_nothing(name):
    """All losses but that of KTO, whose z0 is of a microbatch, are the same however the batch is cut."""
    entire, cut = (problem_of(name, MESHES["dp"], num_microbatches=count) for count in (1, 4))
    testing.assert_close(cut.losses["loss"], entire.losses["loss"], name="loss")
    for path, grad in entire.grads.items():
        testing.assert_close(cut.grads[path], grad, name=path)


@pytest.mark.parametrize("place", ["tp sp", "cp", "pp fsdp"])
def test_log_probabilities_of_answers(place):
    """A program of forwards gives what plain functions give: sums of the log-probabilities of the tokens of answers."""
    problem = problem_of("dpo, columns", MESHES[place])
    chain = AnswerLogps(problem.model, problem.chain.task)
    batch = {key: x for key, x in problem.batch.items() if key not in ("beta", "reference_logps")}
    shapes = {key: (tuple(x.shape), x.dtype) for key, x in batch.items()}
    program = compile_forward(chain, MESHES[place].mesh, preset(MESHES[place].strategy), shapes)
    state = problem.state()
    _, results = program.simulate(type(state)({leaf.path: state.leaves[leaf.path] for leaf in program.state_in}), batch)
    x, context = None, chain.context(batch)
    for segment in chain.segments:
        x, _ = segment.fn(problem.reads(segment), x, context, training=False)
    testing.assert_close(results["logps"], x["logps"], name="logps")


def test_the_model_without_its_adapter_is_the_reference():
    """Both read the same weights; where B is zero they agree, and only the adapter has gradients."""
    trained = [name for name, (_, reference) in TASKS.items() if reference == OFF]
    for name in trained:
        problem = problem_of(name, MESHES["dp"])
        assert all(path.startswith("adapters.") for path in problem.grads)
        assert problem.metrics["head.rewards/margins.mean"][0] != 0
    fresh = Problem(Dpo(), adapt=with_adapter, batch=full_batch(), zeros=".b")
    assert trained and fresh.metrics["head.rewards/margins.mean"][0] == 0
