"""Draw: tokens by chance from their scores, for many rows at once. A row is treated alone, and has noise of its own."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from mpar import ops
from mpar.infer._sampling import Sampling

__all__ = ["draw", "kept_scores"]

_QUAD = 4  # neighbours in the vocabulary whose noise is drawn together
_SMALLEST = 2.0**-25  # takes the place of a draw of 0, whose noise would be infinite; the smallest other draw is twice that
_SMALLEST_TEMPERATURE = 1e-6  # with lower ones scores would overflow; noise decides only between logits that are equal already
_NOISE_RANGE = 19.5  # a little more than from the smallest noise, -log(-log(2**-25)), to the largest, -log(-log(1 - 2**-24))


def draw(logits_RV: Tensor, samplings: Sequence[Sampling], keys: Sequence[tuple[int, int]]) -> Tensor:
    """A token for each row from softmax(logits / temperature) among those that are not cut off: the one with the largest sum of
    its score and Gumbel noise.

    The noise of a token depends on the key of the row and on the token alone. It is drawn, for neighbours in fours, only where
    the scores are near enough to the largest one to win; that changes no result.
    """
    scores_RV = kept_scores(logits_RV, samplings)
    scores_RQ4 = pad(scores_RV, (0, -scores_RV.shape[-1] % _QUAD), value=-torch.inf).unflatten(1, (-1, _QUAD))
    largest_RQ = scores_RQ4.amax(-1)
    row_N, quad_N = (largest_RQ >= largest_RQ.amax(-1, keepdim=True) - _NOISE_RANGE).nonzero().unbind(1)
    keys_R2 = torch.tensor(keys, device=logits_RV.device)
    uniform_N4 = ops.random_quads(keys_R2[row_N], quad_N).clamp_(min=_SMALLEST)
    noisy_RQ4 = torch.full_like(scores_RQ4, -torch.inf)
    noisy_RQ4[row_N, quad_N] = scores_RQ4[row_N, quad_N] - uniform_N4.log_().neg_().log_()
    return ops.row_max(noisy_RQ4.flatten(1))[1]


def kept_scores(logits_RV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """The logits divided by the temperature, and -inf for tokens that top_k, top_p and min_p, in this order, cut off."""
    temperatures = [max(sampling.temperature, _SMALLEST_TEMPERATURE) for sampling in samplings]
    scores_RV = logits_RV / _column(temperatures, logits_RV)
    size = scores_RV.shape[-1]
    cuts: tuple[tuple[Callable[[Tensor, Sequence[float]], Tensor], Sequence[float]], ...] = (
        (_cut_by_count, [sampling.top_k if sampling.top_k < size else 0 for sampling in samplings]),
        (_cut_by_mass, [sampling.top_p if sampling.top_p < 1 else 0 for sampling in samplings]),
        (_cut_by_share, [sampling.min_p for sampling in samplings]),
    )
    for cut_off, options in cuts:
        rows = [row for row, option in enumerate(options) if option]
        if len(rows) == len(options):
            scores_RV = cut_off(scores_RV, options)
        elif rows:
            scores_RV[rows] = cut_off(scores_RV[rows], [options[row] for row in rows])
    return scores_RV


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _cut_by_count(scores_RV: Tensor, counts: Sequence[float]) -> Tensor:
    """Keep the tokens whose score is at least the k-th largest."""
    largest_RK = scores_RV.topk(int(max(counts))).values
    last_R1 = largest_RK.gather(1, torch.tensor(counts, dtype=torch.int64, device=scores_RV.device)[:, None] - 1)
    return scores_RV.masked_fill(scores_RV < last_R1, -torch.inf)


def _cut_by_mass(scores_RV: Tensor, masses: Sequence[float]) -> Tensor:
    """Keep the fewest likeliest tokens that have this probability together.

    Of equally likely ones, the largest ids are kept. Tokens so unlikely that all of them together are cut off are not sorted.
    """
    probs_RV, rest_R1 = scores_RV.softmax(-1), 1 - _column(masses, scores_RV)
    small_RV = probs_RV < rest_R1 / probs_RV.shape[-1]
    width = probs_RV.shape[-1] - int(small_RV.sum(-1).min())
    ids_RK = probs_RV.masked_fill(small_RV, -1).topk(width).indices.sort(-1).values
    probs_RK, order_RK = probs_RV.masked_fill(small_RV, 0).gather(1, ids_RK).sort(dim=-1, stable=True)
    small_R1 = probs_RV.masked_fill(~small_RV, 0).sum(-1, keepdim=True)
    cut_RK = probs_RK.cumsum(-1) + small_R1 <= rest_R1
    cut_RK[:, -1] = False
    kept_RK = torch.empty_like(cut_RK).scatter(1, order_RK, ~cut_RK)
    kept_RV = torch.zeros_like(small_RV).scatter(1, ids_RK, kept_RK)
    return scores_RV.masked_fill(~kept_RV, -torch.inf)


def _cut_by_share(scores_RV: Tensor, shares: Sequence[float]) -> Tensor:
    """Keep the tokens with at least this share of the probability of the likeliest one."""
    probs_RV = scores_RV.softmax(-1)
    least_R1 = probs_RV.amax(-1, keepdim=True) * _column(shares, scores_RV)
    return scores_RV.masked_fill(probs_RV < least_R1, -torch.inf)
