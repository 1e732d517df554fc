"""Ratios of steps taken in turn: their median, and how sure we are of it."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Ratio", "paired_ratio"]

RESAMPLES = 2000


@dataclass(frozen=True)
class Ratio:
    """A median with its 95 % interval, from `count` pairs in `passes` passes."""

    median: float
    low: float
    high: float
    count: int
    passes: int


def paired_ratio(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], *, seed: int = 0) -> Ratio:
    """Median of `ours / theirs` over steps that were taken in turn; both are lists of passes, each a list of steps.

    The interval is the percentile bootstrap in two stages: passes are drawn with replacement, then steps within each, because
    the steps of one pass share its processes and the machine's mood (Davison & Hinkley 1997, Bootstrap Methods, sec. 3.8).
    """
    ratios = [[a / b for a, b in zip(x, y, strict=True)] for x, y in zip(ours, theirs, strict=True)]
    draw = random.Random(seed)
    medians = sorted(
        statistics.median(value for steps in draw.choices(ratios, k=len(ratios)) for value in draw.choices(steps, k=len(steps)))
        for _ in range(RESAMPLES)
    )
    low, high = medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]
    everything = [value for steps in ratios for value in steps]
    return Ratio(statistics.median(everything), low, high, len(everything), len(ratios))
