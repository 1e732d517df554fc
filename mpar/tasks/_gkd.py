"""Generalised knowledge distillation: the student learns the teacher's distribution of every token of an answer, which may be its
own (Agarwal et al. 2023, arXiv:2306.13649, eq. 1 and 4)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mpar import ops
from mpar.errors import ConfigError
from mpar.models import LinearHead
from mpar.tasks._task import BY_TOKEN, Entry, Forward, Forwards, Means, Task

__all__ = ["Gkd", "generalised_jsd"]

_NEVER = -1e30  # finite, so that nothing is multiplied with an infinite number


@dataclass(frozen=True, kw_only=True)
class Gkd(Task):
    """The generalised Jensen-Shannon divergence of `generalised_jsd` from the teacher, the reference model of the chain; the mean
    over the tokens of answers. Raises ConfigError if beta or the temperature is impossible."""

    beta: float = 0.5
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_divergence(self.beta, self.temperature)

    @property
    def entries(self) -> Mapping[str, Entry]:
        """answers (B, S): the index in its row of the answer for which a label counts, or -1."""
        return {"answers": Entry(BY_TOKEN, torch.int64)}

    @property
    def compares(self) -> bool:
        """It compares the model with its teacher."""
        return True

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The number of tokens of answers."""
        return (batch["answers"] >= 0).sum()

    def loss(self, forwards: Forwards) -> tuple[Tensor, Means]:
        """The sum over tokens; `agreement` is how often both find the same token likeliest. Where the logits of both models are
        products, they are made for some tokens at a time (`ops.linear_divergence`)."""
        assert forwards.reference is not None
        counted_BS = forwards.batch["answers"] >= 0
        divergence_BS, agreement_BS = self._of_tokens(forwards.policy, forwards.reference)
        loss, agreeing = (torch.where(counted_BS, x_BS, 0.0).sum() for x_BS in (divergence_BS, agreement_BS))
        return loss, {"divergence": (loss, counted_BS.sum()), "agreement": (agreeing, counted_BS.sum())}

    def _of_tokens(self, policy: Forward, reference: Forward) -> tuple[Tensor, Tensor]:
        """(B, S): the divergence at each position, and 1 where both find the same token likeliest."""
        student, teacher = policy.factors(), reference.factors()
        if student is not None and teacher is not None:
            assert isinstance(policy.head, LinearHead)
            size, chunk = policy.head.vocab_size, policy.head.tokens_at_once
            return ops.linear_divergence(
                *student, *teacher, beta=self.beta, temperature=self.temperature, vocab_size=size, chunk=chunk
            )
        student_BSV, teacher_BSV = _tokens_only(policy), _tokens_only(reference)
        agreement_BS = (student_BSV.argmax(-1) == teacher_BSV.argmax(-1)).to(student_BSV.dtype)
        return token_divergences(student_BSV, teacher_BSV, beta=self.beta, temperature=self.temperature), agreement_BS


def _tokens_only(forward: Forward) -> Tensor:
    """Logits in float32 or wider, so low beyond the vocabulary that nothing there is ever likely."""
    logits_BSV = forward.logits()
    logits_BSV = logits_BSV.to(torch.promote_types(logits_BSV.dtype, torch.float32))
    index_V = torch.arange(logits_BSV.shape[-1], device=logits_BSV.device)
    return torch.where(index_V < forward.head.vocab_size, logits_BSV, _NEVER)


def check_divergence(beta: float, temperature: float) -> None:
    """Raise ConfigError for a beta outside [0, 1] or a temperature that is not positive."""
    if not 0 <= beta <= 1 or temperature <= 0:
        raise ConfigError(f"cannot distil with beta={beta}, temperature={temperature}: beta is from 0 to 1, the other above 0")


def generalised_jsd(
    student_BSV: Tensor, teacher_BSV: Tensor, counted_BS: Tensor, *, beta: float = 0.5, temperature: float = 1.0
) -> Tensor:
    """beta KL(T || M) + (1 - beta) KL(S || M) with M = beta T + (1 - beta) S, summed over the positions that are counted.

    student_BSV, teacher_BSV: logits, which are divided by `temperature`. beta 0 is KL(T || S), and 1 is KL(S || T).
    Raises ConfigError for a beta outside [0, 1] or a temperature that is not positive.
    """
    check_divergence(beta, temperature)
    divergence_BS = token_divergences(student_BSV, teacher_BSV, beta=beta, temperature=temperature)
    return torch.where(counted_BS, divergence_BS, 0.0).sum()


def token_divergences(student_BSV: Tensor, teacher_BSV: Tensor, *, beta: float, temperature: float) -> Tensor:
    """(B, S): the divergence of `generalised_jsd` at each position."""
    student_BSV, teacher_BSV = ((logits / temperature).log_softmax(-1) for logits in (student_BSV, teacher_BSV))
    if beta == 0:
        return _kl(teacher_BSV, student_BSV)
    if beta == 1:
        return _kl(student_BSV, teacher_BSV)
    mixture_BSV = torch.logaddexp(student_BSV + math.log1p(-beta), teacher_BSV + math.log(beta))
    return beta * _kl(teacher_BSV, mixture_BSV) + (1 - beta) * _kl(student_BSV, mixture_BSV)


def _kl(p_BSV: Tensor, q_BSV: Tensor) -> Tensor:
    """KL(p || q) of log-probabilities."""
    return (p_BSV.exp() * (p_BSV - q_BSV)).sum(-1)
