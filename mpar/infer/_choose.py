"""Choose: the next token of every row from its logits. A row is treated alone, so its token does not depend on other rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mpar import ops
from mpar.infer._sampling import Sampling

__all__ = ["Chosen", "History", "choose", "with_logprobs"]


@dataclass(frozen=True)
class History:
    """The tokens of a row so far, and how its next one is chosen.

    choice: which of several answers to the same prompt it is; their draws are unrelated.
    banned: tokens that must not come next. allowed_V: for each token whether it may come next; None: all may.
    """

    prompt: Sequence[int]
    answer: Sequence[int]
    sampling: Sampling
    choice: int = 0
    banned: Sequence[int] = ()
    allowed_V: Tensor | None = None


@dataclass(frozen=True)
class Chosen:
    """The next token of a row.

    logprob:      its log-probability, None unless it was asked for.
    alternatives: `(token, log-probability)` of the likeliest tokens, likeliest first; among equal ones the smallest id is first.
    """

    token: int
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()


def choose(logits_RV: Tensor, rows: Sequence[History]) -> list[Chosen]:
    """The next token of each of `rows` from its row of `logits_RV`. Among equally likely tokens, the smallest id is taken."""
    plain = [_is_plain(row) for row in rows]
    likeliest = logits_RV.argmax(-1).tolist() if any(plain) else []
    chosen = []
    for index, row in enumerate(rows):
        logits_V = logits_RV[index].to(torch.float32)
        token = likeliest[index] if plain[index] else _draw(_changed(logits_V, row), row)
        chosen.append(with_logprobs(token, logits_V, row.sampling.num_alternatives))
    return chosen


def _is_plain(row: History) -> bool:
    changes = row.sampling.counts_tokens or row.sampling.bias or row.banned or row.allowed_V is not None
    return row.sampling.is_greedy and not changes


def _changed(logits_V: Tensor, row: History) -> Tensor:
    """The logits after the bias and the penalties, without tokens that must not come next."""
    sampling, logits_V = row.sampling, logits_V.clone()
    for token, bias in sampling.bias.items():
        logits_V[token] += bias
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted({*row.prompt, *row.answer}), device=logits_V.device)
        old = logits_V[seen]
        logits_V[seen] = torch.where(old < 0, old * sampling.repetition_penalty, old / sampling.repetition_penalty)
    if row.answer and (sampling.presence_penalty or sampling.frequency_penalty):
        answered, counts = torch.tensor(row.answer, device=logits_V.device).unique(return_counts=True)
        logits_V[answered] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    if row.banned:
        logits_V[torch.tensor(row.banned, device=logits_V.device)] = -torch.inf
    if row.allowed_V is not None:
        logits_V[~row.allowed_V.to(logits_V.device)] = -torch.inf
    return logits_V


def _draw(logits_V: Tensor, row: History) -> int:
    """The likeliest token, or one drawn from softmax(logits / temperature) among those that are not cut off."""
    sampling = row.sampling
    if sampling.is_greedy:
        return int(logits_V.argmax())
    ids, scores = _candidates(logits_V / sampling.temperature, sampling)
    key = ops.fold_key(sampling.seed, "sample", row.choice, len(row.prompt) + len(row.answer))
    uniform = ops.random_uniform(key, tuple(logits_V.shape)).to(logits_V.device)[ids]
    return int(ids[(scores - (-uniform.log()).log()).argmax()])  # Gumbel noise: the largest is a draw from the softmax


def _candidates(scores_V: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """The ids, ascending, and the scores of the tokens that top_k, top_p and min_p, in this order, leave."""
    ids = torch.arange(scores_V.shape[0], device=scores_V.device)
    scores = scores_V
    if 0 < sampling.top_k < scores.shape[0]:
        keep = scores >= scores.topk(sampling.top_k).values[-1]
        ids, scores = ids[keep], scores[keep]
    if sampling.top_p < 1:
        ordered, order = scores.sort()
        cut_off = ordered.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        cut_off[-1] = False
        keep = torch.ones_like(cut_off).scatter(0, order, ~cut_off)
        ids, scores = ids[keep], scores[keep]
    if sampling.min_p > 0:
        probabilities = scores.softmax(-1)
        keep = probabilities >= sampling.min_p * probabilities.max()
        ids, scores = ids[keep], scores[keep]
    return ids, scores


def with_logprobs(token: int, logits_V: Tensor, num_alternatives: int | None) -> Chosen:
    """The token with its log-probability and those of the likeliest tokens, unless `num_alternatives` is None."""
    if num_alternatives is None:
        return Chosen(token)
    logprobs_V = logits_V.log_softmax(-1)
    values, ids = logprobs_V.sort(descending=True, stable=True) if num_alternatives else (logprobs_V[:0], logprobs_V[:0])
    likeliest = zip(ids[:num_alternatives].tolist(), values[:num_alternatives].tolist(), strict=True)
    return Chosen(token, float(logprobs_V[token]), tuple((int(i), value) for i, value in likeliest))
