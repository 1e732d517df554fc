"""Distillation: the generalised Jensen-Shannon divergence and its limits."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from mpar import testing, tree
from mpar.errors import ConfigError
from mpar.tasks import Gkd, generalised_jsd
from tests.program.oracle import VOCAB
from tests.tasks.problem import Problem, answers_batch

COUNTED = torch.tensor([[True, True, False, True], [False, True, True, True]])


def logits(seed: int) -> Tensor:
    return torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2


def formula(student: Tensor, teacher: Tensor, beta: float, temperature: float) -> Tensor:
    """The divergence from probabilities, position by position."""
    total = torch.zeros((), dtype=torch.float64)
    for row, place in itertools.product(range(2), range(4)):
        if COUNTED[row, place]:
            s, t = (torch.softmax(x[row, place] / temperature, -1) for x in (student, teacher))
            m = beta * t + (1 - beta) * s
            if beta == 0:
                total = total + (t * torch.log(t / s)).sum()
            elif beta == 1:
                total = total + (s * torch.log(s / t)).sum()
            else:
                total = total + beta * (t * torch.log(t / m)).sum() + (1 - beta) * (s * torch.log(s / m)).sum()
    return total


@pytest.mark.cases(5)
@pytest.mark.parametrize(("beta", "temperature"), [(0.0, 1.0), (1.0, 1.0), (0.5, 0.9), (0.1, 2.0), (0.9, 1.0)])
def test_is_the_formula(beta: float, temperature: float) -> None:
    """Loss and gradient of the student are those of the definition, at both limits, too."""
    student, teacher = logits(0), logits(1)
    found, pull_back = testing.vjp(lambda x: generalised_jsd(x, teacher, COUNTED, beta=beta, temperature=temperature), student)
    expected, expected_pull_back = testing.vjp(lambda x: formula(x, teacher, beta, temperature), student)
    testing.assert_close(found, expected)
    one = torch.ones((), dtype=torch.float64)
    testing.assert_close(pull_back(one)[0], expected_pull_back(one)[0])


def test_scaled_by_the_weight_it_goes_over_into_its_limits() -> None:
    """KL(T || S) is the limit of JSD / beta, KL(S || T) that of JSD / (1 - beta)."""
    student, teacher = logits(2), logits(3)
    for beta, limit in ((1e-6, 0.0), (1 - 1e-6, 1.0)):
        near = generalised_jsd(student, teacher, COUNTED, beta=beta) / min(beta, 1 - beta)
        expected = generalised_jsd(student, teacher, COUNTED, beta=limit)
        assert math.isclose(float(near), float(expected), rel_tol=1e-3)


def test_impossible_values_are_refused() -> None:
    """A mixture has a share from 0 to 1."""
    with pytest.raises(ConfigError, match=r"beta=1.5"):
        generalised_jsd(logits(0), logits(1), COUNTED, beta=1.5)


def test_the_task_is_the_formula_over_the_tokens_of_answers() -> None:
    """The mean over tokens of the divergence of the first `vocab_size` logits; what pads the vocabulary has no part in it."""
    problem = Problem(Gkd(beta=0.3, temperature=0.9), reference=True, batch=answers_batch())
    student, teacher = (problem_logits(problem, prefix) for prefix in ("", "reference."))
    assert student.shape[-1] > VOCAB
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row, place in (problem.batch["answers"] >= 0).nonzero().tolist():
        s, t = (torch.softmax(x[row, place, :VOCAB] / 0.9, -1) for x in (student, teacher))
        m = 0.3 * t + 0.7 * s
        total, count = total + 0.3 * (t * torch.log(t / m)).sum() + 0.7 * (s * torch.log(s / m)).sum(), count + 1
    testing.assert_close(problem.losses["loss"], total / count)


def problem_logits(problem: Problem, prefix: str) -> Tensor:
    """The logits of one of the two models, whose parameters begin with `prefix`."""
    x, context = (
        None,
        problem.model.context({key: problem.batch[key] for key in problem.model.batch_axes if key in problem.batch}),
    )
    for segment in problem.model.segments:
        reads = tuple(tree.get(problem.params, f"{prefix}{path}") for path in segment.paths)
        if segment is problem.model.segments[-1]:
            return segment.fn.token_logits(reads, x, context)
        x, *_ = segment.fn(reads, x, context, training=False)
    raise AssertionError
