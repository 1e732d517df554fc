"""Losses. Where the vocabulary is split, ranks exchange a maximum, a sum and the label's logit of each token."""

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.functions._case import Function, bits, fixed, integers, real

__all__ = ["LOSSES"]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """With smoothing, and without the tokens whose label is 0."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0, label_smoothing=0.1)


def log_likelihood(logits: Tensor, labels: Tensor, keep: Tensor) -> Tensor:
    """The mean log-probability of the labels of each sequence."""
    log_p = logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
    return (log_p * keep).sum(-1) / keep.sum(-1)


def distillation(student: Tensor, teacher: Tensor) -> Tensor:
    """The divergence from a teacher's distribution at temperature 2."""
    log_q, log_p = F.log_softmax(student / 2, dim=-1), F.log_softmax(teacher / 2, dim=-1)
    return 4 * F.kl_div(log_q.flatten(0, 1), log_p.flatten(0, 1), log_target=True, reduction="batchmean")


def info_nce(a: Tensor, b: Tensor) -> Tensor:
    """Contrast in both directions, as in CLIP: every image with every text of the batch."""
    logits = F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T / 0.07
    labels = torch.arange(len(a))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def focal_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy that counts hard examples more."""
    log_p = F.log_softmax(logits, dim=-1).gather(-1, labels[..., None])[..., 0]
    return (-((1 - log_p.exp()) ** 2) * log_p).mean()


def huber_loss(prediction: Tensor, target: Tensor) -> Tensor:
    """Quadratic near 0 and linear beyond."""
    return F.huber_loss(prediction, target, delta=0.5)


def dpo_loss(chosen: Tensor, rejected: Tensor, y_chosen: Tensor, y_rejected: Tensor, reference: Tensor) -> Tensor:
    """Direct preference optimisation: `reference` is by how much the reference model prefers what was chosen."""

    def score(logits: Tensor, labels: Tensor) -> Tensor:
        return torch.gather(logits.log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2).sum(-1)

    margin = score(chosen, y_chosen) - score(rejected, y_rejected) - reference
    return -F.logsigmoid(0.1 * margin).mean()


def ppo_loss(logits: Tensor, actions: Tensor, old_log_p: Tensor, advantage: Tensor, keep: Tensor) -> Tensor:
    """The clipped objective with a bonus for entropy, over the tokens that `keep` names."""
    log_p = logits - logits.logsumexp(-1, keepdim=True)
    entropy = -(log_p.exp() * log_p).sum(-1)
    ratio = (log_p.gather(-1, actions[..., None])[..., 0] - old_log_p).exp()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -((gain + 0.01 * entropy) * keep).sum() / keep.sum()


def z_loss(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy by one_hot, and the squared logarithm of the normaliser."""
    logits = hidden @ head
    log_z = torch.logsumexp(logits, dim=-1)
    picked = (logits * F.one_hot(labels, head.shape[-1])).sum(-1)
    return (log_z - picked).mean() + 1e-4 * log_z.square().mean()


def accuracy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """How often the label is the first, and among the first five."""
    first = (logits.argmax(-1) == labels).double().mean()
    five = (logits.topk(5, dim=-1).indices == labels[..., None]).any(-1).double().mean()
    return first, five


_LOGITS, _LABELS, _TOKENS = real("batch seq vocab"), integers("batch seq", below="vocab"), fixed("batch seq")
_BEST = {"tp": ("the largest of each shard", "its index", "the five largest of each shard", "their indices")}

LOSSES = (
    Function(cross_entropy, (_LOGITS, _LABELS)),
    Function(log_likelihood, (_LOGITS, _LABELS, bits("batch seq"))),
    Function(distillation, (_LOGITS, fixed("batch seq vocab"))),
    Function(info_nce, (real("batch hidden"), real("batch hidden")), {"dp": ("b",)}),
    Function(focal_loss, (_LOGITS, _LABELS)),
    Function(huber_loss, (real("batch seq hidden"), fixed("batch seq hidden"))),
    Function(dpo_loss, (_LOGITS, _LOGITS, _LABELS, _LABELS, fixed("batch"))),
    Function(ppo_loss, (_LOGITS, _LABELS, _TOKENS, _TOKENS, bits("batch seq"))),
    Function(z_loss, (real("batch seq embed"), real("embed vocab"), _LABELS)),
    Function(accuracy, (fixed("batch seq vocab"), _LABELS), _BEST),
)
