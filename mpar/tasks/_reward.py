"""Reward models: a score of an answer, learned from pairs, and scores of steps, learned from labels."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mpar import ops
from mpar.chain import Axes
from mpar.errors import ConfigError
from mpar.tasks._answers import members_of, per_answer
from mpar.tasks._pairs import num_pairs, of_pairs, sides, total
from mpar.tasks._task import BY_ANSWER, BY_TOKEN, Entry, Forwards, Means, Task

__all__ = ["Prm", "Reward", "scores_of"]

SCORE: Mapping[str, Axes] = {"score_D1": ("embed", None)}


def scores_of(forwards: Forwards) -> Tensor:
    """(B, S): the score at each position, a linear function without bias of the features there; float32 or wider."""
    hidden_BSD = forwards.policy.hidden()
    scores_BS1 = ops.einsum("bsd,do->bso", hidden_BSD, forwards.params["score_D1"])
    return scores_BS1[..., 0].to(torch.promote_types(scores_BS1.dtype, torch.float32))


class _ScoreTask(Task):
    """What is learned is a score of features."""

    @property
    def parameters(self) -> Mapping[str, Axes]:
        """The vector that makes scores of features."""
        return SCORE

    @property
    def reads_hidden(self) -> bool:
        """It reads features."""
        return True

    @property
    def reads_logits(self) -> bool:
        """It reads no logits."""
        return False

    @property
    def measured(self) -> Mapping[str, Axes]:
        """The score at each position."""
        return {"scores": BY_TOKEN}

    def measure(self, forwards: Forwards) -> Mapping[str, Tensor]:
        """See `measured`."""
        return {"scores": scores_of(forwards)}


@dataclass(frozen=True, kw_only=True)
class Reward(_ScoreTask):
    """The mean over pairs of -log sigmoid(r_chosen - r_rejected - margin) + centre (r_chosen + r_rejected)^2, where r is the
    score at the last token of an answer (Bradley and Terry 1952; margin: Touvron et al. 2023, arXiv:2307.09288; centre:
    Eisenstein et al. 2023, arXiv:2312.09244).

    margin: a number, or `data`: each pair has its own. Raises ConfigError for a negative `centre`.
    """

    margin: float | Literal["data"] = 0.0
    centre: float = 0.0

    def __post_init__(self) -> None:
        if self.centre < 0:
            raise ConfigError(f"cannot make a loss of scores: centre={self.centre} is negative")

    @property
    def entries(self) -> Mapping[str, Entry]:
        """`ends` (B, S): the index of the answer of which a position is the last, else -1; signs, and margins."""
        entries = {"ends": Entry(BY_TOKEN, torch.int64), "signs": Entry(BY_ANSWER, torch.int64)}
        return {**entries, "margin": Entry(BY_ANSWER)} if self.margin == "data" else entries

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The number of pairs."""
        return num_pairs(batch)

    def loss(self, forwards: Forwards) -> tuple[Tensor, Means]:
        """The sum over pairs; metrics are means over pairs."""
        batch, scores_BS = forwards.batch, scores_of(forwards)
        members_BSN = members_of(batch["ends"], batch["signs"].shape[1], scores_BS.dtype)
        scores, present_BP = sides(per_answer(scores_BS, members_BSN)), of_pairs(batch)
        margin = sides(batch["margin"]).chosen.to(scores_BS.dtype) if self.margin == "data" else self.margin
        losses_BP = -logsigmoid(scores.margin - margin) + self.centre * (scores.chosen + scores.rejected).square()
        count = present_BP.to(scores_BS.dtype).sum()
        right_BP = (scores.chosen > scores.rejected).to(scores_BS.dtype)
        values = {
            "rewards/chosen": scores.chosen,
            "rewards/rejected": scores.rejected,
            "rewards/accuracies": right_BP,
            "rewards/margins": scores.margin,
        }
        return total(losses_BP, present_BP), {name: (total(value, present_BP), count) for name, value in values.items()}


@dataclass(frozen=True)
class Prm(_ScoreTask):
    """The mean over steps of -log sigmoid(r) of those that are right and of -log sigmoid(-r) of those that are wrong, where r is
    the score at the last token of a step (Lightman et al. 2023, arXiv:2305.20050)."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """`step_labels` (B, S): 1 or 0 at the last token of a step that is right or wrong, else -1."""
        return {"step_labels": Entry(BY_TOKEN, torch.int64)}

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The number of steps."""
        return (batch["step_labels"] >= 0).sum()

    def loss(self, forwards: Forwards) -> tuple[Tensor, Means]:
        """The sum over steps; `accuracies` is how often the sign of the score is right."""
        labels_BS, scores_BS = forwards.batch["step_labels"], scores_of(forwards)
        present_BS = labels_BS >= 0
        toward_BS = torch.where(labels_BS == 1, scores_BS, -scores_BS)
        count = present_BS.to(scores_BS.dtype).sum()
        right_BS = (toward_BS > 0).to(scores_BS.dtype)
        return total(-logsigmoid(toward_BS), present_BS), {"accuracies": (total(right_BS, present_BS), count)}
