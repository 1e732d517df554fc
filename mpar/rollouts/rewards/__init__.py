"""Rewards: what an answer is worth. A reward is a function from rollouts to numbers; some are here, others are the user's own."""

from mpar.rollouts.rewards._limit import OutOfTime, limited
from mpar.rollouts.rewards._score import NAMES, Reward, RewardSpec, make_rewards, reward_problems, score

__all__ = ["NAMES", "OutOfTime", "Reward", "RewardSpec", "limited", "make_rewards", "reward_problems", "score"]
