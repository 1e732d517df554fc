"""PPO: advantages from a value function, and clipped losses of policy and values (Schulman et al. 2017, arXiv:1707.06347, eq. 7
and 9; generalised advantages: Schulman et al. 2015, arXiv:1506.02438, eq. 16)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mpar.errors import ConfigError

__all__ = ["PpoLoss", "gae", "ppo_loss", "token_rewards", "whitened"]


@dataclass(frozen=True, kw_only=True)
class PpoLoss:
    """clip: a ratio of probabilities counts within [1 - clip, 1 + clip]. value_clip: a value counts within this distance of that
    when the answer was drawn. value_weight: the weight of the loss of values. Raises ConfigError with all that is impossible.
    """

    clip: float = 0.2
    value_clip: float = 0.2
    value_weight: float = 0.1

    def __post_init__(self) -> None:
        problems = [f"{name}={value} is negative" for name, value in vars(self).items() if value < 0]
        if problems:
            raise ConfigError("cannot make a loss of PPO:\n  " + "\n  ".join(problems))


def token_rewards(scores_R: Tensor, logps_RS: Tensor, reference_logps_RS: Tensor, lengths_R: Tensor, *, beta: float) -> Tensor:
    """(R, S): the reward of each token of answers that begin at 0: minus `beta` times by how much the policy prefers it to the
    reference model, and at the last token also the score of the answer. Zero behind the answers.
    """
    index_S = torch.arange(logps_RS.shape[1], device=logps_RS.device)
    last_RS = (index_S == lengths_R[:, None] - 1).to(logps_RS.dtype)
    kl_RS = torch.where(index_S < lengths_R[:, None], logps_RS - reference_logps_RS, 0.0)
    return last_RS * scores_R[:, None] - beta * kl_RS


def gae(rewards_RS: Tensor, values_RS: Tensor, *, gamma: float = 1.0, lam: float = 0.95) -> tuple[Tensor, Tensor]:
    """(advantages, returns), both (R, S): A_t = d_t + gamma lam A_t+1, where d_t = r_t + gamma V_t+1 - V_t, and returns are
    advantages plus values. Rewards and values behind the end of an answer must be 0.
    """
    next_RS = torch.nn.functional.pad(values_RS[:, 1:], (0, 1))
    deltas_RS = rewards_RS + gamma * next_RS - values_RS
    carried_R, found = torch.zeros_like(deltas_RS[:, 0]), []
    for index in reversed(range(deltas_RS.shape[1])):
        carried_R = deltas_RS[:, index] + gamma * lam * carried_R
        found.append(carried_R)
    advantages_RS = torch.stack(found[::-1], 1)
    return advantages_RS, advantages_RS + values_RS


def whitened(x_RS: Tensor, counted_RS: Tensor, eps: float = 1e-8) -> Tensor:
    """`x_RS` moved and scaled to mean 0 and variance 1 over all that is counted, by the unbiased variance; 0 elsewhere."""
    counted = x_RS[counted_RS]
    return torch.where(counted_RS, (x_RS - counted.mean()) * (counted.var() + eps).rsqrt(), 0.0)


def ppo_loss(
    loss: PpoLoss,
    logps_BS: Tensor,
    values_BS: Tensor,
    *,
    old_logps_BS: Tensor,
    old_values_BS: Tensor,
    advantages_BS: Tensor,
    returns_BS: Tensor,
    counted_BS: Tensor,
) -> tuple[Tensor, Tensor]:
    """(the loss of the policy, the loss of the values times its weight), summed over the tokens that are counted.

    values_BS: what the value function expects from each position on. `old_...` are those when the answers were drawn.
    """
    ratio_BS = torch.where(counted_BS, logps_BS - old_logps_BS, 0.0).exp()
    clipped_BS = ratio_BS.clamp(1 - loss.clip, 1 + loss.clip)
    policy_BS = torch.maximum(-advantages_BS * ratio_BS, -advantages_BS * clipped_BS)
    near_BS = old_values_BS + (values_BS - old_values_BS).clamp(-loss.value_clip, loss.value_clip)
    errors_BS = torch.maximum((values_BS - returns_BS).square(), (near_BS - returns_BS).square())
    policy, values = (torch.where(counted_BS, x_BS, 0.0).sum() for x_BS in (policy_BS, errors_BS))
    return policy, 0.5 * loss.value_weight * values
