"""Distillation: the generalised Jensen-Shannon divergence and its limits."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from mpar import testing
from mpar.errors import ConfigError
from mpar.tasks import generalised_jsd

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
