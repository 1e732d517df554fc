"""Sources in given shares: of each source, as many rows as its weight says."""

from collections.abc import Sequence
from math import ceil, floor

import numpy as np
from numpy.typing import NDArray

__all__ = ["choose", "documents_of", "rows_by_weight"]


def rows_by_weight(weights: Sequence[float], sizes: Sequence[int], stop: str) -> list[int]:
    """How many rows of each source there are, so that they stand in the ratio of `weights`.

    sizes: the usable rows of each source. stop: `first`: no row is repeated, and one source is used up; `all`: no row is left
    out.
    """
    at_one = [size / weight for weight, size in zip(weights, sizes, strict=True)]
    total = min(at_one) if stop == "first" else max(at_one)
    rounded = floor if stop == "first" else ceil
    return [max(1, rounded(round(weight * total, 9))) for weight in weights]


def choose(count: int, size: int) -> NDArray[np.int64]:
    """A fixed choice of `count` of `size` rows, in ascending order: each equally often, give or take one.

    It depends on these two numbers alone.
    """
    repeats, remainder = divmod(count, size)
    draws = np.random.PCG64(np.random.SeedSequence([count, size])).random_raw(size)
    chosen = np.sort(np.argsort(draws, kind="stable")[:remainder])
    return np.concatenate([*[np.arange(size)] * repeats, chosen])


def documents_of(rows: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """The places in `rows` of the wanted rows, in the order of `wanted`; those of a row that is wanted twice, twice.

    rows: the row that each document is from.
    """
    order = np.argsort(rows, kind="stable")
    begins = np.searchsorted(rows[order], wanted, side="left")
    ends = np.searchsorted(rows[order], wanted, side="right")
    return order[np.concatenate([np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)])]
