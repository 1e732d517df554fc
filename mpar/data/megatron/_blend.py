"""In which order samples of several files follow each other: Megatron's BlendedDataset (core/datasets/helpers.cpp).

Sample k comes from the file that lags most behind its share: the one with the largest w_i * max(k, 1) - drawn_i, and of equals
from the first.
"""

from collections.abc import Sequence
from math import ceil

import numpy as np
from numpy.typing import NDArray

__all__ = ["blend", "samples_for"]

_SURPLUS = 0.005
"""Megatron builds this share more samples of each file than its weight says, because shares are met only up to rounding."""


def samples_for(weights: Sequence[float], num_samples: int) -> tuple[int, list[int]]:
    """(samples of a blend of at least `num_samples`, samples that each file must have for it)."""
    shares = _shares(weights)
    wanted = [ceil(num_samples * share) for share in shares]
    return sum(wanted), [ceil(count * (1 + _SURPLUS)) for count in wanted]


def blend(
    weights: Sequence[float], num_samples: int, sizes: Sequence[int] | None = None
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """(number of the file, number of the sample in it) of each sample of the blend, each of (num_samples,).

    sizes: the samples of each file; a file of which all have been taken is passed over. None: files do not end.
    """
    shares = _shares(weights)
    drawn = [0] * len(shares)
    open_files = list(range(len(shares)))
    chosen = np.empty(num_samples, np.int16)
    for k in range(num_samples):
        at = float(max(k, 1))
        best = max(open_files, key=lambda i: shares[i] * at - drawn[i])  # called before k changes
        chosen[k] = best
        drawn[best] += 1
        if sizes is not None and drawn[best] == sizes[best]:
            open_files.remove(best)
    return chosen, _numbers_within(chosen, len(shares))


def _shares(weights: Sequence[float]) -> list[float]:
    array = np.asarray(weights, np.float64)
    return (array / np.sum(array)).tolist()


def _numbers_within(chosen: NDArray[np.int16], num_files: int) -> NDArray[np.int64]:
    """For each sample, how many samples before it come from the same file."""
    numbers = np.empty(len(chosen), np.int64)
    for i in range(num_files):
        places = np.flatnonzero(chosen == i)
        numbers[places] = np.arange(len(places))
    return numbers
