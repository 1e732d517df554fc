"""Choose: the next tokens of many rows from their logits, in one pass. No row's token depends on other rows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mpar import ops
from mpar.infer._draw import draw
from mpar.infer._sampling import Sampling

__all__ = ["Chosen", "History", "choose"]


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

    @property
    def takes_largest(self) -> bool:
        """Whether the next token is that of the largest logit, and nothing is asked of the others."""
        sampling = self.sampling
        changed = sampling.bias or sampling.repetition_penalty != 1 or (sampling.counts_answer and self.answer) or self.banned
        return sampling.is_greedy and sampling.num_alternatives is None and not changed and self.allowed_V is None

    @property
    def key(self) -> tuple[int, int]:
        """The key of the noise with which the next token is drawn."""
        return ops.fold_key(self.sampling.seed, "sample", self.choice, len(self.prompt) + len(self.answer))


@dataclass(frozen=True)
class Chosen:
    """The next token of a row.

    logprob:      its log-probability, None unless it was asked for.
    alternatives: `(token, log-probability)` of the likeliest tokens, likeliest first; among equal ones the smallest id is first.
    """

    token: int
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()


def choose(logits_RV: Tensor, rows: Sequence[History]) -> list[Chosen | None]:
    """The next token of each of `rows` from its row of `logits_RV`; None if the largest of these is no finite number. Among
    equally likely tokens, the smallest id is taken."""
    logits_RV = logits_RV.to(torch.float32)
    changed_RV = _changed(logits_RV, rows)
    drawn = [index for index, row in enumerate(rows) if not row.sampling.is_greedy]
    if len(drawn) == len(rows):
        tokens_R, largest_R = _drawn(changed_RV, rows), logits_RV.amax(-1)
    else:
        largest_R, tokens_R = ops.row_max(changed_RV)
        if changed_RV is not logits_RV:
            largest_R = logits_RV.amax(-1)
        if drawn:
            tokens_R[drawn] = _drawn(changed_RV[drawn], [rows[index] for index in drawn])
    pairs = zip(tokens_R.tolist(), largest_R.tolist(), strict=True)
    chosen = [Chosen(token) if math.isfinite(largest) else None for token, largest in pairs]
    asked = [index for index, row in enumerate(rows) if row.sampling.num_alternatives is not None and chosen[index] is not None]
    if asked:
        counts = [rows[index].sampling.num_alternatives or 0 for index in asked]
        for index, with_logprobs in zip(asked, _with_logprobs(logits_RV[asked], tokens_R[asked], counts), strict=True):
            chosen[index] = with_logprobs
    return chosen


def _drawn(logits_RV: Tensor, rows: Sequence[History]) -> Tensor:
    return draw(logits_RV, [row.sampling for row in rows], [row.key for row in rows])


def _changed(logits_RV: Tensor, rows: Sequence[History]) -> Tensor:
    """The logits after the bias and the penalties, without tokens that must not come next."""
    biased = [(index, row.sampling.bias) for index, row in enumerate(rows) if row.sampling.bias]
    repeated = [index for index, row in enumerate(rows) if row.sampling.repetition_penalty != 1]
    counted = [index for index, row in enumerate(rows) if row.sampling.counts_answer and row.answer]
    banned = [index for index, row in enumerate(rows) if row.banned]
    masked = [(index, row.allowed_V) for index, row in enumerate(rows) if row.allowed_V is not None]
    if not (biased or repeated or counted or banned or masked):
        return logits_RV
    logits_RV = logits_RV.clone()
    for index, bias in biased:
        logits_RV[index, list(bias)] += torch.tensor(list(bias.values()), device=logits_RV.device)
    if repeated:
        place = _places(repeated, [[*rows[index].prompt, *rows[index].answer] for index in repeated], logits_RV)
        old, penalty = logits_RV[place], _values([row.sampling.repetition_penalty for row in rows], place[0])
        logits_RV[place] = torch.where(old < 0, old * penalty, old / penalty)
    if counted:
        place_2N, counts_N = torch.stack(_places(counted, [rows[index].answer for index in counted], logits_RV)).unique(
            dim=1, return_counts=True
        )
        presence = _values([row.sampling.presence_penalty for row in rows], place_2N[0])
        frequency = _values([row.sampling.frequency_penalty for row in rows], place_2N[0])
        logits_RV[place_2N.unbind()] -= presence + frequency * counts_N
    if banned:
        logits_RV[_places(banned, [rows[index].banned for index in banned], logits_RV)] = -torch.inf
    for index, allowed_V in masked:
        logits_RV[index, ~allowed_V.to(logits_RV.device)] = -torch.inf
    return logits_RV


def _places(indices: Sequence[int], tokens: Sequence[Sequence[int]], logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """`(rows, ids)` of all tokens: `tokens` has a list for each row of `indices`."""
    counts = torch.tensor([len(ids) for ids in tokens])
    rows_N = torch.tensor(indices).repeat_interleave(counts)
    ids_N = torch.tensor([token for ids in tokens for token in ids])
    return rows_N.to(logits_RV.device), ids_N.to(logits_RV.device)


def _values(by_row: Sequence[float], rows_N: Tensor) -> Tensor:
    return torch.tensor(by_row, device=rows_N.device)[rows_N]


def _with_logprobs(logits_RV: Tensor, tokens_R: Tensor, counts: Sequence[int]) -> list[Chosen]:
    """The tokens with their log-probabilities, and those of so many of the likeliest tokens of each row."""
    logprobs_RV = logits_RV.log_softmax(-1)
    tokens, logprobs = tokens_R.tolist(), logprobs_RV.gather(1, tokens_R[:, None])[:, 0].tolist()
    likeliest: list[list[tuple[int, float]]] = [[] for _ in tokens]
    largest = min(max(counts), logprobs_RV.shape[-1])
    if largest:
        least_R1 = logprobs_RV.topk(largest).values[:, -1:]
        row_N, id_N = (logprobs_RV >= least_R1).nonzero().unbind(1)  # more than `largest` where some are equally likely
        for row, token, value in zip(row_N.tolist(), id_N.tolist(), logprobs_RV[row_N, id_N].tolist(), strict=True):
            likeliest[row].append((token, value))
    alternatives = [sorted(pairs, key=lambda pair: -pair[1])[:count] for pairs, count in zip(likeliest, counts, strict=True)]
    return [Chosen(*each) for each in zip(tokens, logprobs, map(tuple, alternatives), strict=True)]
