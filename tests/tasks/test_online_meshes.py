"""A step with GRPO, PPO or distillation, simulated on many meshes in float64: all it gives is what one rank gives."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from mpar import Mesh, models, testing
from mpar.compiler import Schedule
from mpar.models import Trainable
from mpar.program import Program, State, positions_in_order
from mpar.program.compile import compile_forward, compile_step
from mpar.schedules import layout_letters
from mpar.strategy import preset
from mpar.tasks import Gkd, Grpo, Measured, Ppo, Task, task_means
from tests.program.oracle import MOE
from tests.tasks.problem import QWEN3, Problem, Recorder, answers_batch

ZBV = Schedule("zbv", None, "E|t|t|L")
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
    tokens = torch.randn(3, *batch["tokens"].shape, generator=generator, dtype=torch.float64)
    tokens = torch.where(batch["answers"] >= 0, tokens, 0.0)
    of_tokens = dict(zip(("old_values", "token_advantages", "returns"), tokens, strict=True))
    return {**batch, "advantages": torch.where(batch["signs"] >= 0, columns, 0.0), **of_tokens}


def teacher() -> Trainable:
    """A model of the same vocabulary, deeper, narrower, and with other rotations."""
    sizes = {"num_hidden_layers": QWEN3["num_hidden_layers"] + 2, "hidden_size": 24, "intermediate_size": 40, "rope_theta": 500.0}
    return models.from_config({**QWEN3, **sizes}, dtype=torch.float64, vocab_multiple=8)


TASKS: Mapping[str, Callable[[], tuple[Task, bool | Trainable]]] = {
    "grpo": lambda: (Grpo(loss_type="grpo", ratio="sequence"), False),
    "ppo": lambda: (Ppo(), True),
    "gkd": lambda: (Gkd(beta=0.3, temperature=0.9), teacher()),
}
"""What is learned online, and whether there is a reference model, or which."""


def problem_of(name: str, **options: object) -> Problem:
    """A step of a task in TASKS."""
    task, reference = TASKS[name]()
    return Problem(task, reference=reference, batch=online_batch(), **options)


def compiled(problem: Problem, mesh: Mesh, strategy: str, schedule: Schedule | str | None) -> Program:
    """The program of its step."""
    count, chosen = problem.num_microbatches, preset(strategy)
    return compile_step(problem.chain, Recorder(), mesh, chosen, problem.shapes, num_microbatches=count, schedule=schedule)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", TASKS)
def test_step_is_exact(name, place):
    """Loss, metrics and gradients, with ratios of answers, values, and a teacher of another size."""
    mesh, strategy, schedule, config = PLACES[place]
    problem = problem_of(name, config=config, num_microbatches=4 if schedule else 1)
    assert problem.losses["loss"] != 0
    problem.check(compiled(problem, mesh, strategy, schedule))


def test_grpo_beside_a_reference_model_is_exact():
    """The divergence from a frozen copy in the same program, weighed by the ratio of each token."""
    task = Grpo(beta=0.1, weigh_kl=True, epsilon_high=0.3)
    problem = Problem(task, reference=True, batch=online_batch())
    problem.check(compiled(problem, *PLACES["tp and fsdp"][:3]))
    assert float(problem.metrics["head.kl.mean"][0]) > 0


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_the_largest_gap_is_that_of_all_microbatches(name):
    """However a batch is cut, the highest difference of log-probabilities is that of one token of it."""
    entire, cut = problem_of(name), problem_of(name, num_microbatches=4)
    assert float(entire.metrics["head.gap_highest.highest"]) > float(entire.metrics["head.gap.mean"][0] / 30)
    testing.assert_close(cut.metrics["head.gap_highest.highest"], entire.metrics["head.gap_highest.highest"])
    found = task_means(compiled(cut, Mesh(dp=1), "ddp", None).simulate(cut.state(), cut.batch)[1])
    assert found["gap_highest"] == pytest.approx(float(entire.metrics["head.gap_highest.highest"]), rel=1e-12)


@pytest.mark.parametrize("place", ["zero3", "tp and fsdp", "ring in zigzag", "zero bubble"])
def test_what_is_measured_is_exact(place):
    """Values and log-probabilities by the reference model, in the order of the rows, on the stages of a step."""
    mesh, strategy, schedule, _ = {**PLACES, "zero bubble": (Mesh(pp=2), "ddp", ZBV, QWEN3)}[place]
    problem = problem_of("ppo", num_microbatches=4 if schedule else 1)
    program = compiled(problem, mesh, strategy, schedule)
    chain = Measured(problem.chain.base, problem.chain.task, problem.chain.reference)
    batch = {key: x for key, x in problem.batch.items() if key in chain.batch_axes}
    forwards = [[action for action in actions if action.kind == "F" and not action.microbatch] for actions in program.schedule]
    order = Schedule("forwards", layout=layout_letters(program.facts.stage_of), table=forwards)
    shapes = {key: (tuple(x.shape), x.dtype) for key, x in batch.items()}
    measuring = compile_forward(chain, mesh, strategy, shapes, schedule=order)
    state = problem.state()
    _, results = measuring.simulate(State({leaf.path: state.leaves[leaf.path] for leaf in measuring.state_in}), batch)
    x, context = None, chain.context(batch)
    for segment in chain.segments:
        x, *_ = segment.fn(problem.reads(segment), x, context, training=False)
    assert set(x) == {"values", "reference_logps"}
    for name, expected in x.items():
        testing.assert_close(positions_in_order(measuring, results[name]), expected, name=name)
