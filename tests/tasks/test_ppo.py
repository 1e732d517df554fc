"""PPO: rewards of tokens, advantages and clipped losses by their formulas."""

import itertools

import pytest
import torch
from torch import Tensor

from mpar import testing
from mpar.errors import ConfigError
from mpar.tasks import PpoLoss, gae, ppo_loss, token_rewards, whitened

LENGTHS = torch.tensor([4, 1, 6])
COUNTED = torch.arange(6) < LENGTHS[:, None]


def draw(seed: int) -> Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_reward_of_a_token_is_the_divergence_and_at_the_end_the_score() -> None:
    """Each token pays for leaving the reference model; the last one gets the score."""
    scores, logps, reference = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64), draw(1), draw(2)
    found = token_rewards(scores, logps, reference, LENGTHS, beta=0.05)
    for row, place in itertools.product(range(3), range(6)):
        inside, last = place < int(LENGTHS[row]), place == int(LENGTHS[row]) - 1
        expected = -0.05 * float(logps[row, place] - reference[row, place]) * inside + float(scores[row]) * last
        assert float(found[row, place]) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0)])
def test_advantages_are_the_weighted_sum_of_all_later_errors(gamma: float, lam: float) -> None:
    """A_t is the sum of (gamma lam)^k d_(t+k) over the tokens that follow; at lam 1 the return is the discounted reward."""
    rewards, values = torch.where(COUNTED, draw(3), 0.0), torch.where(COUNTED, draw(4), 0.0)
    advantages, returns = gae(rewards, values, gamma=gamma, lam=lam)
    for row in range(3):
        size = int(LENGTHS[row])
        after = [*values[row, 1:size].tolist(), 0.0]
        errors = [float(rewards[row, t]) + gamma * after[t] - float(values[row, t]) for t in range(size)]
        expected = [sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, size)) for t in range(size)]
        testing.assert_close(advantages[row, :size], torch.tensor(expected, dtype=torch.float64))
        if lam == 1:
            testing.assert_close(returns[row, 0], rewards[row, :size].sum())
    testing.assert_close(returns, advantages + values)


def test_whitened_values_have_mean_0_and_variance_1() -> None:
    """What is not counted neither matters nor stays."""
    found = whitened(draw(5) * 3 + 7, COUNTED, eps=0.0)
    inside = [float(found[row, place]) for row, place in itertools.product(range(3), range(6)) if place < LENGTHS[row]]
    assert sum(inside) == pytest.approx(0, abs=1e-12)
    assert sum(x * x for x in inside) / (len(inside) - 1) == pytest.approx(1, rel=1e-12)
    assert not found[~COUNTED].any()


def formula(loss: PpoLoss, logps: Tensor, values: Tensor, of: dict[str, Tensor]) -> Tensor:
    """The sum of both losses, token by token."""
    total = torch.zeros((), dtype=torch.float64)
    for row, place in itertools.product(range(3), range(6)):
        if place >= LENGTHS[row]:
            continue
        old, old_value, advantage, reached = (
            of[name][row, place] for name in ("old_logps_BS", "old_values_BS", "advantages_BS", "returns_BS")
        )
        ratio, value = torch.exp(logps[row, place] - old), values[row, place]
        bounded = max(min(ratio, 1 + loss.clip), 1 - loss.clip)
        near = max(min(value, old_value + loss.value_clip), old_value - loss.value_clip)
        total = total - min(ratio * advantage, bounded * advantage)
        total = total + loss.value_weight * max((value - reached) ** 2, (near - reached) ** 2) / 2
    return total


def test_losses_are_clipped_as_in_the_paper() -> None:
    """Both losses, and their gradients with respect to policy and values, are the formula's."""
    names = ("old_logps_BS", "old_values_BS", "advantages_BS", "returns_BS")
    of = {name: draw(10 + i) for i, name in enumerate(names)}
    logps, values = of["old_logps_BS"] + 0.3 * draw(20), of["old_values_BS"] + 0.3 * draw(21)
    loss = PpoLoss(clip=0.2, value_clip=0.15, value_weight=0.1)
    found, pull_back = testing.vjp(lambda x, v: sum(ppo_loss(loss, x, v, **of, counted_BS=COUNTED)), logps, values)
    expected, expected_pull_back = testing.vjp(lambda x, v: formula(loss, x, v, of), logps, values)
    testing.assert_close(found, expected)
    one = torch.ones((), dtype=torch.float64)
    for gradient, wanted, name in zip(pull_back(one), expected_pull_back(one), ("logps", "values"), strict=True):
        testing.assert_close(gradient, wanted, name=name)


def test_impossible_values_are_refused() -> None:
    """A negative bound is named."""
    with pytest.raises(ConfigError, match=r"clip=-0\.1 is negative"):
        PpoLoss(clip=-0.1)
