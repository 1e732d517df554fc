"""Advantages are the differences from the group, divided as asked for."""

import statistics

import pytest

from mpar.rollouts import advantages

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
