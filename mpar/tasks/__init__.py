"""Tasks: what is learned, as pure losses over the log-probabilities of answers."""

from mpar.tasks._gkd import generalised_jsd
from mpar.tasks._grpo import GrpoLoss, GrpoTokens, grpo_loss
from mpar.tasks._ppo import PpoLoss, gae, ppo_loss, token_rewards, whitened

__all__ = [
    "GrpoLoss",
    "GrpoTokens",
    "PpoLoss",
    "gae",
    "generalised_jsd",
    "grpo_loss",
    "ppo_loss",
    "token_rewards",
    "whitened",
]
