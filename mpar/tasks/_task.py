"""Task: what is learned, as a pure loss of one or two forwards of a batch; and Forward, what a loss may ask of a forward."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mpar.chain import Axes
from mpar.models import HiddenHead, LanguageHead, LinearHead

__all__ = ["BY_ANSWER", "BY_TOKEN", "Entry", "Forward", "Forwards", "Means", "Task"]

BY_TOKEN: Axes = ("batch", "seq")
BY_ANSWER: Axes = ("batch", None)
Means = Mapping[str, tuple[Tensor, ...]]
"""Metrics by name, each as a sum and the count that it is divided by, so that the mean is right over microbatches and ranks; or
as one number, of which the highest of all microbatches is reported."""


@dataclass(frozen=True)
class Entry:
    """An entry of the batch: its logical axes, BY_TOKEN (B, S) or BY_ANSWER (B, N), and its dtype."""

    axes: Axes
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Forward:
    """The end of a forward through one model: what its last segment is given. Only what a loss asks for is computed."""

    head: LanguageHead
    params: tuple
    x: Tensor
    context: Mapping[str, Tensor]

    def logps(self) -> Tensor:
        """The log-probability (B, S) of each label, float32 or wider; 0 where the label is -100."""
        return -self.head.token_losses(self.params, self.x, self.context)

    def logits(self) -> Tensor:
        """Logits (B, S, V), where V may be padded beyond the vocabulary."""
        return self.head.token_logits(self.params, self.x, self.context)

    def factors(self) -> tuple[Tensor, Tensor] | None:
        """Features (B, S, D) and a matrix (D, V) whose product the logits are; None if the model does not say."""
        return self.head.factors(self.params, self.x, self.context) if isinstance(self.head, LinearHead) else None

    def hidden(self) -> Tensor:
        """The features (B, S, D) that are multiplied with the output matrix."""
        assert isinstance(self.head, HiddenHead)  # `TaskChain` has refused others, for a task with `reads_hidden`
        return self.head.hidden(self.params, self.x, self.context)


@dataclass(frozen=True)
class Forwards:
    """What a loss reads: the forward of the policy, which is trained; that of the reference model, if there is one in the
    program; the batch with the entries of the task; and the parameters of the task's own, by name."""

    policy: Forward
    reference: Forward | None
    batch: Mapping[str, Tensor]
    params: Mapping[str, Tensor] = field(default_factory=dict)


class Task(ABC):
    """What is learned. A subclass is a frozen dataclass of options, because equal tasks share one kind of segment.

    The rows of its batches hold answers. Besides the entries of the model (tokens, labels, positions, documents), there are those
    that `entries` names, such as

    answers (B, S): the index in its row of the answer for which the label at a position counts, or -1;
    signs (B, N):   for each of the N answers that a row may have: 1 if it is preferred, 0 if it is not, -1 if there is none.

    An answer is a document with its prompt, and never cut, so that what a row gives depends on no other row. Answers 2k and
    2k + 1 of a row are a pair, the preferred one first. So both are in the same microbatch and on the same rank of dp, and where
    ranks share a sequence, the sums over positions are pending sums.
    """

    @property
    @abstractmethod
    def entries(self) -> Mapping[str, Entry]:
        """The entries of the batch that it reads besides those of the model."""

    @property
    def parameters(self) -> Mapping[str, Axes]:
        """Parameters of its own by name, with their logical axes. Dims called `embed` have the width of the model, others 1."""
        return {}

    @property
    def compares(self) -> bool:
        """Whether it compares the model with a reference model."""
        return False

    @property
    def reads_hidden(self) -> bool:
        """Whether it reads features."""
        return False

    @property
    def reads_logits(self) -> bool:
        """Whether it reads log-probabilities or logits; if not, the output matrix of the model has no use."""
        return True

    @property
    def reads_prompts(self) -> bool:
        """Whether labels are wanted at all positions of a document, also where they count for no answer."""
        return False

    @abstractmethod
    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        """How much there is to learn from in a batch, such as the number of its pairs; a scalar. The loss is divided by that of
        the entire step, so it does not depend on how the step is cut into microbatches."""

    @abstractmethod
    def loss(self, forwards: Forwards) -> tuple[Tensor, Means]:
        """The sum of the losses of all pairs, answers or tokens, and metrics."""

    @property
    def measured(self) -> Mapping[str, Axes]:
        """What `measure` gives, by name, with its logical axes. Where batches are made of answers that the model gives, those
        entries that depend on its parameters at that time are made of these numbers."""
        return {}

    def measure(self, forwards: Forwards) -> Mapping[str, Tensor]:
        """The numbers that `measured` names, of the answers in a batch."""
        return {}
