"""Losses of variants must agree, because variants that are compared train the same model."""

from collections.abc import Mapping, Sequence

__all__ = ["LOSS_TOLERANCE", "LossesDiffer", "check_losses", "largest_spread"]

LOSS_TOLERANCE = 1e-5


class LossesDiffer(Exception):
    """Two variants did not train the same model."""


def check_losses(mean_losses: Mapping[str, Sequence[float]], tolerance: float = LOSS_TOLERANCE) -> float:
    """The largest relative difference between variants over all steps. Raises LossesDiffer beyond `tolerance`."""
    names = [name for name in mean_losses if not name.startswith("floor")]
    worst = 0.0
    for index, values in enumerate(zip(*(mean_losses[name] for name in names), strict=True)):
        spread = (max(values) - min(values)) / abs(values[0])
        if not spread <= tolerance:
            shown = "\n".join(f"  {name:20s} {value:.7f}" for name, value in zip(names, values, strict=True))
            raise LossesDiffer(f"step {index}: losses differ by {spread:.2e}, more than {tolerance:.0e} of the first:\n{shown}")
        worst = max(worst, spread)
    return worst


def largest_spread(losses: Mapping[str, Sequence[Sequence[float]]], tolerance: float = LOSS_TOLERANCE) -> float:
    """`check_losses` over all passes; `losses` are by variant, by pass, by step."""
    num_passes = len(next(iter(losses.values())))
    return max(check_losses({name: passes[i] for name, passes in losses.items()}, tolerance) for i in range(num_passes))
