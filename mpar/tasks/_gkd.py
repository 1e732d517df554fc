"""Generalised knowledge distillation: the student learns the teacher's distribution of every token of an answer, which may be its
own (Agarwal et al. 2023, arXiv:2306.13649, eq. 1 and 4)."""

import math

import torch
from torch import Tensor

from mpar.errors import ConfigError

__all__ = ["generalised_jsd"]


def generalised_jsd(
    student_BSV: Tensor, teacher_BSV: Tensor, counted_BS: Tensor, *, beta: float = 0.5, temperature: float = 1.0
) -> Tensor:
    """beta KL(T || M) + (1 - beta) KL(S || M) with M = beta T + (1 - beta) S, summed over the positions that are counted.

    student_BSV, teacher_BSV: logits, which are divided by `temperature`. beta 0 is KL(T || S), and 1 is KL(S || T).
    Raises ConfigError for a beta outside [0, 1] or a temperature that is not positive.
    """
    if not 0 <= beta <= 1 or temperature <= 0:
        raise ConfigError(f"cannot distil with beta={beta}, temperature={temperature}: beta is from 0 to 1, the other above 0")
    student_BSV, teacher_BSV = ((logits / temperature).log_softmax(-1) for logits in (student_BSV, teacher_BSV))
    if beta == 0:
        divergence_BS = _kl(teacher_BSV, student_BSV)
    elif beta == 1:
        divergence_BS = _kl(student_BSV, teacher_BSV)
    else:
        mixture_BSV = torch.logaddexp(student_BSV + math.log1p(-beta), teacher_BSV + math.log(beta))
        divergence_BS = beta * _kl(teacher_BSV, mixture_BSV) + (1 - beta) * _kl(student_BSV, mixture_BSV)
    return torch.where(counted_BS, divergence_BS, 0.0).sum()


def _kl(p_BSV: Tensor, q_BSV: Tensor) -> Tensor:
    """KL(p || q) of log-probabilities."""
    return (p_BSV.exp() * (p_BSV - q_BSV)).sum(-1)
