"""Advantages are the differences from the group, divided as asked for."""

import statistics

import pytest
import torch

from mpar.rollouts import TokenAdvantages, advantages
from mpar.rollouts._advantages import with_token_advantages
from tests.rollouts.made import rollout

REWARDS = [[1.0, 0.0, 0.5, 0.25], [2.0, 2.0, 2.0, 2.0], [0.0, None, 1.0, -1.0]]


@pytest.mark.cases(6)
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("baseline", ["mean", "others"])
def test_are_the_formula(scale, baseline):
    """(r - baseline) / (std + 1e-4) with the unbiased deviation; answers without a reward count for nothing."""
    everything = [reward for group in REWARDS for reward in group if reward is not None]
    for group, found in zip(REWARDS, advantages(REWARDS, scale, baseline), strict=True):
        kept = [reward for reward in group if reward is not None]
        divisor = {"group": statistics.stdev(kept), "batch": statistics.stdev(everything)}.get(scale)
        for reward, advantage in zip(group, found, strict=True):
            if reward is None:
                assert advantage == 0
                continue
            others = list(kept)
            others.remove(reward)
            base = statistics.fmean(kept if baseline == "mean" else others)
            expected = (reward - base) / (1 if divisor is None else divisor + 1e-4)
            assert advantage == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_a_single_reward_has_nothing_to_be_compared_with():
    """Its advantage is 0, whatever it is."""
    assert advantages([[None, 3.0]], "group") == advantages([[None, 3.0]], "none", "others") == [[0.0, 0.0]]


def test_advantages_of_tokens_are_those_of_the_values_and_whitened_over_all_rollouts():
    """Rewards are what a token pays for leaving the reference model, and the score at the end; an answer that does not count has
    no advantages, and no part in the mean and the deviation of the others."""
    how, gamma, lam = TokenAdvantages(beta=0.1, gamma=0.9, lam=0.7), 0.9, 0.7
    made = []
    for number, size in enumerate((3, 1, 4)):
        draw = torch.randn(3, size, generator=torch.Generator().manual_seed(number), dtype=torch.float64).tolist()
        numbers = {"values": tuple(draw[1]), "reference_logps": tuple(draw[2])}
        made.append(rollout("x" * size, logps=tuple(draw[0]), reward=float(number) - 0.5, of_tokens=numbers))
    found = with_token_advantages(made, [True, False, True], how)
    plain = []
    for one in made:
        values, size = [*one.of_tokens["values"], 0.0], len(one.answer_ids)
        rewards = [-0.1 * (p - q) for p, q in zip(one.logps, one.of_tokens["reference_logps"], strict=True)]
        rewards[-1] += one.reward
        errors = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(size)]
        plain.append([sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, size)) for t in range(size)])
    counted = [value for number in (0, 2) for value in plain[number]]
    mean, deviation = statistics.mean(counted), statistics.stdev(counted)
    for one, of_one, result, counts in zip(made, plain, found, (True, False, True), strict=True):
        expected = [(value - mean) / deviation if counts else 0.0 for value in of_one]
        assert result.of_tokens["token_advantages"] == pytest.approx(expected, rel=1e-7, abs=1e-12)  # eps is 1e-8
        returns = [value + advantage for value, advantage in zip(one.of_tokens["values"], of_one, strict=True)]
        assert result.of_tokens["returns"] == pytest.approx(returns, rel=1e-12)
