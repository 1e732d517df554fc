"""Ratios of steps that were taken in turn: their median, and its confidence interval."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Ratio", "interval_text", "paired_ratio", "verdict"]

RESAMPLES = 2000


@dataclass(frozen=True)
class Ratio:
    """A median with its 95 % interval, from `count` pairs in `passes` passes."""

    median: float
    low: float
    high: float
    count: int
    passes: int

    def rounded(self, digits: int = 4) -> list[float]:
        """Median, lower and upper end of the interval, as lines of results have them."""
        return [round(x, digits) for x in (self.median, self.low, self.high)]


def paired_ratio(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], *, seed: int = 0) -> Ratio:
    """Median of `ours / theirs` over steps that were taken in turn; both are lists of passes, each a list of steps.

    The interval is the percentile bootstrap in two stages: passes are drawn with replacement, then steps within each, because
    the steps of a pass share processes and the load of the machine (Davison & Hinkley 1997, Bootstrap Methods, sec. 3.8).
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


def interval_text(values: Sequence[float] | None) -> str:
    """A rounded ratio and its interval, for a table; "" for None."""
    return "" if values is None else f"{values[0]:.3f} ({values[1]:.3f} to {values[2]:.3f})"


def verdict(values: Sequence[float], bar: float) -> str:
    """Whether the whole interval of a rounded ratio is under the bar (met), only its lower end (straddled), or neither."""
    _, low, high = values
    return "met" if high <= bar else "straddled" if low <= bar else "**missed**"
