"""The losses of GRPO and its kin are the published formulas, answer by answer, with their gradients."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from mpar import testing
from mpar.errors import ConfigError
from mpar.tasks import GrpoLoss, GrpoTokens, grpo_loss

LENGTHS = ((3, 5, 1), (4, 0, 2))  # of the answers of two rows; an answer of no token is none
SEQ_LEN, NUM_ANSWERS = 14, 3


def batch(seed: int = 0) -> tuple[Tensor, GrpoTokens]:
    """Log-probabilities of a policy that has moved on, and what was recorded; answers lie behind prompts of two tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    answers_BS = torch.full((2, SEQ_LEN), -1)
    for row, lengths in enumerate(LENGTHS):
        place = 0
        for answer, length in enumerate(lengths):
            answers_BS[row, place + 1 : place + 1 + length] = answer
            place += 1 + length + 1
    old = -draw(2, SEQ_LEN).abs()
    near = [old + 0.3 * draw(2, SEQ_LEN) for _ in range(3)]
    return near[0], GrpoTokens(answers_BS, draw(2, NUM_ANSWERS), old, near[1], near[2])


def formula(loss: GrpoLoss, logps: Tensor, of: GrpoTokens) -> Tensor:
    """The sum of the losses, one answer after the other, by the definitions in the papers."""
    total = torch.zeros((), dtype=torch.float64)
    for row, answer in itertools.product(range(2), range(NUM_ANSWERS)):
        here = of.answers_BS[row] == answer
        new, old, ref, rollout = (
            x[row][here] for x in (logps, of.old_logps_BS, of.reference_logps_BS, of.rollout_logps_BS) if x is not None
        )
        advantage, count = of.advantages_BN[row, answer], len(new)
        if not count:
            continue
        if loss.ratio == "token":
            ratio = torch.exp(new) / torch.exp(old)
        elif loss.ratio == "sequence":
            ratio = ((new.sum() - old.sum()) / count).exp() * torch.ones(count, dtype=torch.float64)
        elif loss.ratio == "sequence_sum":
            ratio = (new.sum().exp() / old.sum().exp()) * torch.ones(count, dtype=torch.float64)
        else:
            ratio = ((new.sum() - old.sum()) / count).exp().detach() * new.exp() / new.exp().detach()
        low, high = 1 - loss.epsilon, 1 + loss.high
        if loss.loss_type == "cispo":
            tokens = -ratio.detach().clamp(max=loss.high) * advantage * new
        else:
            upper = math.inf if loss.delta is None else loss.delta
            tokens = torch.stack([-min(min(r, upper) * advantage, max(min(r, high), low) * advantage) for r in ratio])
        if loss.correction is not None:
            apart = (old - rollout).detach()
            weights = apart.exp() if loss.correction.startswith("token") else apart.sum().exp().expand(count)
            bounded = [min(float(w), loss.max_correction) for w in weights]
            masked = [float(w) if w <= loss.max_correction else 0.0 for w in weights]
            tokens = tokens * torch.tensor(bounded if "truncate" in loss.correction else masked, dtype=torch.float64)
        kl = torch.exp(ref) / torch.exp(new) - torch.log(torch.exp(ref) / torch.exp(new)) - 1
        tokens = tokens + loss.beta * (kl * ratio if loss.weigh_kl else kl)
        reduced = {"grpo": tokens.mean(), "dr_grpo": tokens.sum() / (loss.max_tokens or 1)}
        total = total + reduced.get(loss.loss_type, tokens.sum())
    return total


LOSSES = [
    *(GrpoLoss(loss_type=kind, max_tokens=7) for kind in ("grpo", "bnpo", "dapo", "dr_grpo")),
    GrpoLoss(loss_type="cispo", epsilon_high=1.1),
    *(GrpoLoss(loss_type="grpo", ratio=ratio, epsilon=0.05) for ratio in ("sequence", "sequence_token", "sequence_sum")),
    GrpoLoss(epsilon=0.2, epsilon_high=0.28),
    GrpoLoss(delta=1.4, epsilon=0.1),
    GrpoLoss(loss_type="grpo", beta=0.04),
    GrpoLoss(beta=0.3, weigh_kl=True),
    *(GrpoLoss(correction=name, max_correction=1.2) for name in ("token_truncate", "token_mask")),
    *(GrpoLoss(correction=name, max_correction=1.2, beta=0.1) for name in ("sequence_truncate", "sequence_mask")),
]


@pytest.mark.cases(len(LOSSES))
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss.loss_type}-{loss.ratio}-{loss.correction}-{loss.beta}")
def test_is_the_formula(loss: GrpoLoss) -> None:
    """Loss and gradient are those of the formula, in float64."""
    logps, of = batch()
    found, pull_back = testing.vjp(lambda x: grpo_loss(loss, x, of)[0], logps)
    expected, expected_pull_back = testing.vjp(lambda x: formula(loss, x, of), logps)
    testing.assert_close(found, expected, name="loss")
    one = torch.ones((), dtype=torch.float64)
    testing.assert_close(pull_back(one)[0], expected_pull_back(one)[0], name="gradient")


def test_counts_what_is_clipped() -> None:
    """A token is counted as clipped where its ratio is outside the bounds on the side that its advantage pushes to."""
    logps, of = batch(3)
    found = grpo_loss(GrpoLoss(epsilon=0.1, beta=0.1), logps, of)[1]
    low = high = ratios = kl = 0.0
    for row, place in itertools.product(range(2), range(SEQ_LEN)):
        answer = int(of.answers_BS[row, place])
        if answer < 0:
            continue
        ratio, better = math.exp(logps[row, place] - of.old_logps_BS[row, place]), bool(of.advantages_BN[row, answer] > 0)
        low, high, ratios = low + int(ratio < 0.9 and not better), high + int(ratio > 1.1 and better), ratios + ratio
        apart = float(of.reference_logps_BS[row, place] - logps[row, place])
        kl += math.exp(apart) - apart - 1
    assert low > 0 and high > 0
    assert (float(found["clipped_low"]), float(found["clipped_high"])) == (low, high)
    testing.assert_close(found["ratio"], torch.tensor(ratios, dtype=torch.float64))
    testing.assert_close(found["kl"], torch.tensor(kl, dtype=torch.float64))


def test_a_policy_that_has_not_moved_has_the_gradient_of_reinforce() -> None:
    """At a ratio of 1 the gradient of every token is minus its advantage, whichever ratio is clipped (but of GSPO's mean)."""
    logps, of = batch()
    here = of.answers_BS >= 0
    advantages = torch.where(here, of.advantages_BN.gather(1, of.answers_BS.clamp(min=0)), 0.0)
    still = GrpoTokens(of.answers_BS, of.advantages_BN, logps)
    for loss in (GrpoLoss(), GrpoLoss(ratio="sequence_token"), GrpoLoss(loss_type="cispo", epsilon_high=5.0)):
        _, pull_back = testing.vjp(lambda x, loss=loss: grpo_loss(loss, x, still)[0], logps)
        testing.assert_close(pull_back(torch.ones((), dtype=torch.float64))[0], -advantages)


def test_impossible_values_are_listed() -> None:
    """All values that do not go together are named at once."""
    with pytest.raises(ConfigError, match=r"epsilon=-1.0 is negative\n.*needs epsilon_high"):
        GrpoLoss(loss_type="cispo", epsilon=-1.0)
    with pytest.raises(ConfigError, match=r"dr_grpo needs max_tokens[^\n]*\n.*delta=1.1 is not above"):
        GrpoLoss(loss_type="dr_grpo", delta=1.1)
