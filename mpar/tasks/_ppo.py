"""PPO: advantages from a value function, and clipped losses of policy and values (Schulman et al. 2017, arXiv:1707.06347, eq. 7
and 9; generalised advantages: Schulman et al. 2015, arXiv:1506.02438, eq. 16)."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mpar import ops
from mpar.chain import Axes
from mpar.errors import ConfigError
from mpar.tasks._task import BY_ANSWER, BY_TOKEN, Entry, Forwards, Means, Task

__all__ = ["Ppo", "PpoLoss", "gae", "ppo_loss", "token_rewards", "whitened"]


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
    """`x_RS` moved and scaled to mean 0 and variance 1 over all that is counted, by the unbiased variance; 0 elsewhere, and if
    only one is counted."""
    counted = x_RS[counted_RS]
    variance = counted.var(correction=min(1, max(0, len(counted) - 1)))
    return torch.where(counted_RS, (x_RS - counted.mean()) * (variance + eps).rsqrt(), 0.0)


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


@dataclass(frozen=True, kw_only=True)
class Ppo(Task, PpoLoss):
    """PPO as a task, with the options of `PpoLoss`. The value of a position is a linear function without bias of the features
    there, so the model and its values share all but that vector, which begins at zero.

    beta: what a token pays for being likelier than with the reference model; 0: there is none. gamma, lam: of `gae`. bar: see
        `Grpo`.
    Raises ConfigError with all that is impossible.
    """

    beta: float = 0.05
    gamma: float = 1.0
    lam: float = 0.95
    bar: float = 0.01

    @property
    def entries(self) -> Mapping[str, Entry]:
        """All (B, S) but `signs`: answers, signs and old_logps as of `Grpo`; old_values: when the answer was drawn;
        token_advantages and returns: of `gae`.
        """
        floats = ("old_logps", "old_values", "token_advantages", "returns")
        entries = {"signs": Entry(BY_ANSWER, torch.int64), "answers": Entry(BY_TOKEN, torch.int64)}
        return {**entries, **dict.fromkeys(floats, Entry(BY_TOKEN))}

    @property
    def parameters(self) -> Mapping[str, Axes]:
        """The vector that makes values of features."""
        return {"value_D1": ("embed", None)}

    @property
    def compares(self) -> bool:
        """With `beta`, rewards of tokens are compared with a reference model."""
        return self.beta > 0

    @property
    def reads_hidden(self) -> bool:
        """Values are made of features."""
        return True

    @property
    def measured(self) -> Mapping[str, Axes]:
        """The values, and with `beta` the log-probabilities of the labels by the reference model."""
        return {"values": BY_TOKEN, **({"reference_logps": BY_TOKEN} if self.compares else {})}

    def measure(self, forwards: Forwards) -> Mapping[str, Tensor]:
        """See `measured`."""
        found = {"values": self._values(forwards)}
        return found if forwards.reference is None else {**found, "reference_logps": forwards.reference.logps()}

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The number of tokens of answers."""
        return (batch["answers"] >= 0).sum()

    def loss(self, forwards: Forwards) -> tuple[Tensor, Means]:
        """See `ppo_loss`; metrics are means over tokens."""
        batch, logps_BS, values_BS = forwards.batch, forwards.policy.logps(), self._values(forwards)
        old_logps_BS, old_values_BS, advantages_BS, returns_BS = (
            batch[key].to(logps_BS.dtype) for key in ("old_logps", "old_values", "token_advantages", "returns")
        )
        counted_BS = batch["answers"] >= 0
        policy, values = ppo_loss(
            self,
            logps_BS,
            values_BS,
            old_logps_BS=old_logps_BS,
            old_values_BS=old_values_BS,
            advantages_BS=advantages_BS,
            returns_BS=returns_BS,
            counted_BS=counted_BS,
        )
        change_BS = logps_BS.detach() - old_logps_BS
        seen = {
            "policy_loss": policy,
            "value_loss": values,
            "values": self._counted(values_BS, counted_BS),
            "returns": self._counted(returns_BS, counted_BS),
            "ratio": self._counted(change_BS.exp(), counted_BS),
            "clipped": self._counted((change_BS.exp() - 1).abs() > self.clip, counted_BS),
            "value_clipped": self._counted((values_BS - old_values_BS).abs() > self.value_clip, counted_BS),
            "gap": self._counted(change_BS.abs(), counted_BS),
            "apart": self._counted(change_BS.abs() > self.bar, counted_BS),
        }
        if forwards.reference is not None:
            nearer_BS = forwards.reference.logps() - logps_BS.detach()
            seen["kl"] = self._counted(nearer_BS.exp() - nearer_BS - 1, counted_BS)
        means: dict[str, tuple[Tensor, ...]] = {name: (total, counted_BS.sum()) for name, total in seen.items()}
        return policy + values, {**means, "gap_highest": (torch.where(counted_BS, change_BS, 0.0).abs().amax(),)}

    def _values(self, forwards: Forwards) -> Tensor:
        """(B, S): what is expected from each position on; float32 or wider."""
        values_BS1 = ops.einsum("bsd,do->bso", forwards.policy.hidden(), forwards.params["value_D1"])
        return values_BS1[..., 0].to(torch.promote_types(values_BS1.dtype, torch.float32))

    @staticmethod
    def _counted(x_BS: Tensor, counted_BS: Tensor) -> Tensor:
        dtype = x_BS.dtype if x_BS.is_floating_point() else torch.float32
        return torch.where(counted_BS, x_BS.to(dtype), 0.0).sum()
