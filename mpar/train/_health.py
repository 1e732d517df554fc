"""Health of a run: is what a step reports finite, is it a spike beside the steps before, is there a gradient at all?"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mpar.errors import NumericsError
from mpar.program import NO_LIMITS, Limits
from mpar.train._config import PlainConfig, TrainConfig

__all__ = ["MIN_HISTORY", "Health", "Seen", "judge"]

MIN_HISTORY = 16
"""Values that must be known before one can be called a spike: `spike.window` is at least as long."""
_DEVIATIONS = 1.4826  # a normal distribution has this many standard deviations in its median absolute deviation
_LEAST_SPREAD = 0.01  # as a share of the median: values that hardly differ would make a spike of the smallest change


@dataclass(frozen=True)
class Seen:
    """What one step reported. skipped: whether its update was left out, so that the state is what it was before the step."""

    step: int
    loss: float
    grad_norm: float
    microbatch_losses: tuple[float, ...]
    weight: float
    skipped: bool

    @classmethod
    def of(cls, step: int, metrics: Mapping[str, Tensor]) -> "Seen":
        """From the metrics of `step`, which this waits for."""
        loss, grad_norm, weight = (float(metrics[name]) for name in ("loss", "grad_norm", "weight"))
        return cls(step, loss, grad_norm, tuple(metrics["microbatch_losses"].tolist()), weight, bool(metrics["skipped"]))

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient norm are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class Health:
    """What the past steps of a run say about the next one. Every rank has the same, and checkpoints record it.

    losses, grad_norms: the finite ones of the newest steps, oldest first. skipped: steps whose update was left out, in the whole
    run, and `in_a_row` at its end.
    """

    losses: tuple[float, ...] = ()
    grad_norms: tuple[float, ...] = ()
    skipped: int = 0
    in_a_row: int = 0

    @classmethod
    def from_plain(cls, plain: Any) -> "Health":
        """From what `as_plain` returns. Raises ValueError if it is something else."""
        match plain:
            case {"losses": list(losses), "grad_norms": list(norms), "skipped": int(skipped), "in_a_row": int(in_a_row)}:
                return cls(tuple(map(float, losses)), tuple(map(float, norms)), skipped, in_a_row)
        raise ValueError("not the health of a run")

    def as_plain(self) -> PlainConfig:
        """The same as plain data; floats keep their bits in JSON."""
        plain: PlainConfig = {"losses": [*self.losses], "grad_norms": [*self.grad_norms]}
        return {**plain, "skipped": self.skipped, "in_a_row": self.in_a_row}

    def limits(self, z: float) -> Limits:
        """The largest loss and gradient norm that are no spikes: `z` standard deviations above the median.

        The deviation is estimated from the median absolute deviation (Leys et al. 2013, doi:10.1016/j.jesp.2013.03.013), which,
        unlike a mean, earlier spikes hardly change.
        """
        return Limits(*(_limit(values, z) for values in (self.losses, self.grad_norms)))

    def after(self, seen: Seen, window: int) -> "Health":
        """The health after one more step, which looks back over at most `window` steps."""
        losses, norms = (
            (*values, value)[-window:] if math.isfinite(value) else values
            for values, value in ((self.losses, seen.loss), (self.grad_norms, seen.grad_norm))
        )
        return Health(losses, norms, self.skipped + seen.skipped, (self.in_a_row + 1) * seen.skipped)


def _limit(values: Sequence[float], z: float) -> float:
    if len(values) < MIN_HISTORY:
        return NO_LIMITS.loss
    median, deviation = _median_and_deviation(values)
    return median + z * deviation if deviation > 0 else NO_LIMITS.loss


def _median_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    median = statistics.median(values)
    spread = statistics.median(abs(value - median) for value in values)
    return median, max(_DEVIATIONS * spread, _LEAST_SPREAD * abs(median))


def judge(config: TrainConfig, before: Health, seen: Seen, locate: Callable[[], str]) -> tuple[str, ...]:
    """What is wrong with a step, in words, which is nothing for most. Raises NumericsError if the run must stop because of it.

    before: the health when the step began. locate: finds the first tensor that is not finite, in words; it runs the step again.
    """
    if not seen.is_finite:
        problem = f"{_where(seen)}; the first tensor that is not finite is {locate()}"
        if config.on_spike != "skip":
            raise NumericsError(_stopped(problem, seen, "or skip such steps with on_spike=skip"))
    elif (problem := _spike(before, seen, config.spike.z)) and config.on_spike == "stop":
        raise NumericsError(_stopped(problem, seen, "raise spike.z, or choose on_spike=skip or warn"))
    if seen.skipped and before.in_a_row >= config.spike.max_skips:
        why = f"{problem}; {before.in_a_row + 1} steps in a row were skipped, and spike.max_skips={config.spike.max_skips}"
        raise NumericsError(_stopped(why, seen, "or raise spike.max_skips"))
    notes = [f"{problem}{'; the update was skipped' if seen.skipped else ''}"] if problem else []
    return (*notes, *_no_gradient(config, before, seen))


def _where(seen: Seen) -> str:
    losses = seen.microbatch_losses
    bad = [m for m, value in enumerate(losses) if not math.isfinite(value)]
    if bad:
        return f"the loss is {seen.loss} in step {seen.step}, first in microbatch {bad[0]} (in {len(bad)} of {len(losses)})"
    if not math.isfinite(seen.loss):
        return f"the loss is {seen.loss} in step {seen.step}, while it is finite in each microbatch"
    return f"the gradient norm is {seen.grad_norm} in step {seen.step}, while the loss is {seen.loss} (all microbatches)"


def _spike(before: Health, seen: Seen, z: float) -> str:
    """The spikes of a step in words; an empty text if there are none."""
    limits, words = before.limits(z), []
    for name, value, limit, values in (
        ("loss", seen.loss, limits.loss, before.losses),
        ("gradient norm", seen.grad_norm, limits.grad_norm, before.grad_norms),
    ):
        if value > limit:
            median, deviation = _median_and_deviation(values)
            far = (value - median) / deviation
            words.append(
                f"the {name} is {value:.4g} in step {seen.step}, {far:.1f} deviations above {median:.4g}, the median of "
                f"{len(values)} steps"
            )
    return " and ".join(words)


def _no_gradient(config: TrainConfig, before: Health, seen: Seen) -> list[str]:
    """A note if the gradient norm is exactly zero and was not in the step before; NumericsError if the run must stop then."""
    if seen.grad_norm != 0 or before.grad_norms[-1:] == (0.0,):
        return []
    causes = "no label of this batch is trained on (look at data.token_weights and the data)"
    if seen.weight > 0:
        causes = (
            f"{seen.weight:.0f} labels are trained on, so the loss does not depend on the parameters, or every gradient is too "
            "small for its dtype (compare precision=fp32)"
        )
    if config.task.kind == "prompt" and config.task.learn != "gkd":
        causes = (
            "all answers of each group were worth the same, so there is nothing to learn from (task.max_redraws)"
            if seen.weight > 0
            else "no answer has a reward (the number without_reward), or with task.drop_truncated none ended by itself"
        )
    problem = f"the gradient norm is exactly zero in step {seen.step}: {causes}"
    if config.on_zero_gradient == "stop":
        raise NumericsError(f"training stopped: {problem}.\nTo go on with a note, choose on_zero_gradient=warn.")
    return [problem]


def _stopped(problem: str, seen: Seen, way_out: str) -> str:
    state = "The update of this step was left out" if seen.skipped else "The update of this step was made"
    return (
        f"training stopped: {problem}.\n{state}, and nothing was saved; earlier checkpoints are unchanged.\n"
        f"Lower optimizer.lr, set optimizer.clip_norm or a longer warm-up, look at the rows of this step, {way_out}; then start "
        "the same command again, which goes on from the last checkpoint."
    )
