"""A step with a task, simulated on many meshes in float64: loss, metrics and gradients are those of one rank."""

import pytest
import torch

from mpar import Mesh, adapters, testing
from mpar.compiler import Schedule
from mpar.program.compile import compile_forward, compile_step
from mpar.strategy import preset
from mpar.tasks import AnswerLogps, Cpo, Dft, Dpo, Kto, Orpo, Prm, Reward
from tests.program.oracle import MOE
from tests.program.test_experts import spread
from tests.tasks.problem import LENGTHS, Problem, Recorder, answers_batch

ZBV = Schedule("zbv", None, "E|t|t|L")
PLACES = {
    "dp": (Mesh(dp=4), "ddp", None),
    "zero3": (Mesh(fsdp=4), "zero3", None),
    "tp of a shared stream": (Mesh(tp=2), "tp_sp", None),
    "ring in zigzag": (Mesh(cp=2), "zero3", None),
    "cp with tp": (Mesh(cp=2, tp=2), "zero1_tp_sp", None),
    "zero bubble": (Mesh(pp=2), "ddp", ZBV),
    "stages of shards": (Mesh(pp=2, fsdp=2), "zero3", None),
}
TASKS = {
    "dpo, columns": (Dpo(reference="columns", ld_alpha=0.5, beta="data"), False),
    "dpo, model": (Dpo(losses=(("ipo", 1.0), ("sft", 0.3))), True),
    "kto": (Kto(reference="columns"), False),
    "orpo": (Orpo(), False),
    "simpo": (Cpo(loss_type="simpo"), False),
    "reward": (Reward(margin="data", centre=0.1), False),
    "prm": (Prm(), False),
    "dft": (Dft(), False),
}


def full_batch(name):
    batch = answers_batch()
    ends = torch.full_like(batch["answers"], -1)
    for row, lengths in enumerate(LENGTHS):
        for number in range(len(lengths)):
            ends[row, sum(lengths[: number + 1]) - 1] = number
    if name == "kto":
        batch["signs"] = torch.where((torch.arange(4) % 2 == 1) & (batch["signs"] >= 0), 2, batch["signs"])
        batch["signs"][1, 0] = 0
    if name == "orpo":
        batch["labels"] = batch["all_labels"]
    return {**batch, "ends": ends, "step_labels": torch.where(ends >= 0, ends % 2, -1)}


def problem_of(name, **options):
    task, reference = TASKS[name]
    return Problem(task, reference=reference, batch=full_batch(name), **options)


def compiled(problem, mesh, strategy, schedule=None):
    return compile_step(
        problem.chain,
        Recorder(),
        mesh,
        preset(strategy) if isinstance(strategy, str) else strategy,
        problem.shapes,
        num_microbatches=problem.num_microbatches,
        schedule=schedule,
    )


@pytest.mark.cases(3)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", TASKS)
def test_step_is_exact(name, place):
    """Loss, metrics and gradients; a pipeline has two microbatches of two rows."""
    mesh, strategy, schedule = PLACES[place]
    problem = problem_of(name, num_microbatches=2 if mesh.axis_size("pp") > 1 else 1, logits_chunk=8 if place == "dp" else None)
    problem.check(compiled(problem, mesh, strategy, schedule))


@pytest.mark.parametrize("name", ["dpo, model", "kto"])
def test_models_of_experts(name):
    """Experts are spread over ranks that share rows and sequences; the side losses of routers keep their weight."""
    problem = problem_of(name, config={**MOE, "router_aux_loss_coef": 0.01})
    problem.check(compiled(problem, Mesh(fsdp=2, cp=2), spread(4, "zero3")))


@pytest.mark.parametrize("name", [name for name in TASKS if name != "kto"])
def test_microbatches_change_nothing(name):
    """All losses but that of KTO, whose z0 is of a microbatch, are the same however the batch is cut."""
    entire, cut = problem_of(name), problem_of(name, num_microbatches=4)
    testing.assert_close(cut.losses["loss"], entire.losses["loss"], name="loss")
    for path, grad in entire.grads.items():
        testing.assert_close(cut.grads[path], grad, name=path)


@pytest.mark.parametrize("place", ["tp of a shared stream", "ring in zigzag", "stages of shards"])
def test_log_probabilities_of_answers(place):
    """A program of forwards gives what plain functions give: sums of the log-probabilities of the tokens of answers."""
    mesh, strategy, _ = PLACES[place]
    problem = problem_of("dpo, columns")
    chain = AnswerLogps(problem.model, problem.chain.task)
    batch = {key: x for key, x in problem.batch.items() if key not in ("beta", "reference_logps")}
    program = compile_forward(chain, mesh, strategy, {key: (tuple(x.shape), x.dtype) for key, x in batch.items()})
    state = problem.state()
    _, results = program.simulate(type(state)({leaf.path: state.leaves[leaf.path] for leaf in program.state_in}), batch)
    x, context = None, chain.context(batch)
    for segment in chain.segments:
        x, _ = segment.fn(problem.reads(segment), x, context, training=False)
    testing.assert_close(results["logps"], x["logps"], name="logps")


@pytest.mark.parametrize("place", ["zero3", "tp of a shared stream", "zero bubble"])
def test_the_model_without_its_adapter_is_the_reference(place):
    """Both read the same weights; where B is zero they agree, and only the adapter has gradients."""
    mesh, strategy, schedule = PLACES[place]
    adapt = lambda model: adapters.add(model, adapters.LoRA(rank=2, alpha=4))  # noqa: E731
    problem = Problem(Dpo(), adapt=adapt, num_microbatches=2 if schedule else 1)
    assert set(problem.grads) == {path for path in problem.grads if path.startswith("adapters.")}
    assert problem.metrics["head.rewards/margins.mean"][0] != 0
    problem.check(compiled(problem, mesh, strategy, schedule))
    fresh = Problem(Dpo(), adapt=adapt, zeros=".b")
    assert fresh.metrics["head.rewards/margins.mean"][0] == 0
