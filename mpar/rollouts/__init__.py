"""Rollouts: answers that the policy gives while it is trained, what they are worth, and the batches that are made of them."""

from mpar.rollouts._advantages import TokenAdvantages, advantages
from mpar.rollouts._batches import RolloutBatches
from mpar.rollouts._drawing import Drawing, Exchange, Measure, ReplyIds
from mpar.rollouts._environment import Conversation, Environment, make_environment
from mpar.rollouts._files import RolloutFile, RolloutHeader, list_rollouts, read_rollouts
from mpar.rollouts._held_out import HELD_OUT_FOLDER, HeldOut
from mpar.rollouts._plan import RolloutPlan
from mpar.rollouts._prompts import Prompts
from mpar.rollouts._rollout import Rollout
from mpar.rollouts._sampler import Ask, Drawn, EngineSampler, Sampler
from mpar.rollouts.rewards import Reward, RewardSpec, make_rewards, reward_problems

__all__ = [
    "HELD_OUT_FOLDER",
    "Ask",
    "Conversation",
    "Drawing",
    "Drawn",
    "EngineSampler",
    "Environment",
    "Exchange",
    "HeldOut",
    "Measure",
    "Prompts",
    "ReplyIds",
    "Reward",
    "RewardSpec",
    "Rollout",
    "RolloutBatches",
    "RolloutFile",
    "RolloutHeader",
    "RolloutPlan",
    "Sampler",
    "TokenAdvantages",
    "advantages",
    "list_rollouts",
    "make_environment",
    "make_rewards",
    "read_rollouts",
    "reward_problems",
]
