"""Learning rates: pure functions from the number of a step to the rate of its update. Step 1 is the first one.

With `w` warm-up steps, `T` total steps and peak `lr`, all of them have these rates:

    step 1        lr / w          (warm-up is linear from a rate of 0 at step 0, which does not exist)
    step w        lr
    step T        the minimum     (constant: lr)
    after T       the minimum

Without warm-up the peak would be the rate of step 0, so the rate of step 1 is already lower. The schedulers of transformers give
step `n` the rate that these formulas have at `n - 1`, so their first step has rate 0 if there is warm-up.
"""

import math
from dataclasses import dataclass
from typing import Literal

from mpar.errors import ConfigError

__all__ = ["WSD", "Constant", "Cosine", "LearningRate", "Linear", "learning_rate"]

DecayShape = Literal["linear", "cosine", "1-sqrt"]
_SHAPES = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "1-sqrt": lambda progress: 1.0 - math.sqrt(progress),
}


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """The base of all learning rates. Called with the number of a step, which counts from 1, it gives the rate of its update.

    lr:            the peak rate.
    total_steps:   the number of the last step. Only Constant may leave it out, and then `warmup_ratio` cannot be used.
    warmup_steps, warmup_ratio:  at most one of them. The ratio is one of `total_steps`; its product is rounded up, but a ratio
                   below 1 leaves at least one step.
    min_lr, min_ratio:           at most one of them. The ratio is one of `lr`; the default is 0.

    Making one raises ConfigError, which lists everything that is wrong. Calling it with `step` < 1 raises ConfigError.
    """

    lr: float
    total_steps: int | None = None
    warmup_steps: int | None = None
    warmup_ratio: float | None = None
    min_lr: float | None = None
    min_ratio: float | None = None

    def __post_init__(self) -> None:
        problems = self._problems()
        if problems:
            raise ConfigError(f"cannot make the learning rate {self!r}:\n  " + "\n  ".join(problems))

    def __call__(self, step: int) -> float:
        """The learning rate of step `step`."""
        if step < 1:
            raise ConfigError(f"{type(self).__name__}: there is no update {step}; the first update is step 1")
        warmup = self.num_warmup_steps
        return self.lr * step / warmup if step < warmup else self._after_warmup(step)

    @property
    def num_warmup_steps(self) -> int:
        """The number of the first step with the peak rate; 0 without warm-up."""
        if self.warmup_ratio is not None:
            total = self.total_steps or 0
            share = _share(self.warmup_ratio, total)
            return min(share, total - 1) if self.warmup_ratio < 1 else share  # even a very short run has a step after warm-up
        return self.warmup_steps or 0

    @property
    def minimum(self) -> float:
        """The rate of step `total_steps` and of all steps after it."""
        return self.lr * self.min_ratio if self.min_ratio is not None else self.min_lr or 0.0

    def _after_warmup(self, step: int) -> float:
        raise NotImplementedError

    def _between(self, shape: DecayShape, start: int, step: int) -> float:
        """The rate of step `step` on a curve of `shape` from `lr` at step `start` to the minimum at `total_steps`."""
        assert self.total_steps is not None
        if step >= self.total_steps:
            return self.minimum
        share = _SHAPES[shape]((step - start) / (self.total_steps - start)) if step > start else 1.0
        return min(self.lr, self.minimum + (self.lr - self.minimum) * share)  # the rounded sum may exceed the peak by one bit

    def _problems(self) -> list[str]:
        problems = []
        if not (math.isfinite(self.lr) and self.lr >= 0):
            problems.append(f"lr must be finite and not negative, not {self.lr}")
        if self.total_steps is not None and self.total_steps < 1:
            problems.append(f"total_steps must be at least 1, not {self.total_steps}")
        for one, other in (("warmup_steps", "warmup_ratio"), ("min_lr", "min_ratio")):
            if getattr(self, one) is not None and getattr(self, other) is not None:
                problems.append(f"{one}={getattr(self, one)} and {other}={getattr(self, other)} are both given: give one")
        problems += [f"{name} must be between 0 and 1, not {value}" for name, value in self._ratios() if not 0 <= value <= 1]
        if self.warmup_ratio is not None and self.total_steps is None:
            problems.append("warmup_ratio needs total_steps; give warmup_steps instead")
        if self.warmup_steps is not None and self.warmup_steps < 0:
            problems.append(f"warmup_steps must not be negative, not {self.warmup_steps}")
        if self.min_lr is not None and not 0 <= self.min_lr <= self.lr:
            problems.append(f"min_lr must be between 0 and lr={self.lr}, not {self.min_lr}")
        if not problems and self.total_steps is not None and self.num_warmup_steps > self.total_steps:
            problems.append(f"warm-up takes {self.num_warmup_steps} steps, more than total_steps={self.total_steps}")
        return problems

    def _ratios(self) -> list[tuple[str, float]]:
        return [(name, value) for name in ("warmup_ratio", "min_ratio") if (value := getattr(self, name)) is not None]


@dataclass(frozen=True, kw_only=True)
class Constant(LearningRate):
    """Warm-up, then `lr` for all steps. It has no minimum."""

    def _after_warmup(self, step: int) -> float:
        return self.lr

    def _problems(self) -> list[str]:
        given = [name for name in ("min_lr", "min_ratio") if getattr(self, name) is not None]
        return super()._problems() + [f"a constant rate has no {name}: use Linear, Cosine or WSD" for name in given]


@dataclass(frozen=True, kw_only=True)
class _Decaying(LearningRate):
    """A rate that reaches its minimum at `total_steps`, which must be given."""

    def _problems(self) -> list[str]:
        problems = super()._problems()
        if self.total_steps is None:
            return ["total_steps is missing: it says when the minimum is reached", *problems]
        if not problems and self.num_warmup_steps == self.total_steps:
            problems.append(f"warm-up takes all {self.total_steps} steps and leaves none to decay in; use Constant")
        return problems


@dataclass(frozen=True, kw_only=True)
class Linear(_Decaying):
    """Warm-up, then a straight line to the minimum."""

    def _after_warmup(self, step: int) -> float:
        return self._between("linear", self.num_warmup_steps, step)


@dataclass(frozen=True, kw_only=True)
class Cosine(_Decaying):
    """Warm-up, then half a period of a cosine to the minimum (Loshchilov & Hutter 2017, arXiv:1608.03983, eq. 5, one cycle)."""

    def _after_warmup(self, step: int) -> float:
        return self._between("cosine", self.num_warmup_steps, step)


@dataclass(frozen=True, kw_only=True)
class WSD(_Decaying):
    """Warm-up, stable, decay: `lr` until step `total_steps - num_decay_steps`, then a curve of `shape` to the minimum.

    The length of the decay is `decay_steps`, or `decay_ratio` times `total_steps`, rounded up; by default the ratio is 0.1.
    """

    decay_steps: int | None = None
    decay_ratio: float | None = None
    shape: DecayShape = "linear"

    @property
    def num_decay_steps(self) -> int:
        """The number of steps of the decay, whose rates are below the peak."""
        if self.decay_steps is not None:
            return self.decay_steps
        return _share(0.1 if self.decay_ratio is None else self.decay_ratio, self.total_steps or 0)

    def _after_warmup(self, step: int) -> float:
        assert self.total_steps is not None
        return self._between(self.shape, self.total_steps - self.num_decay_steps, step)

    def _problems(self) -> list[str]:
        problems = super()._problems()
        if self.decay_steps is not None and self.decay_ratio is not None:
            problems.append(f"decay_steps={self.decay_steps} and decay_ratio={self.decay_ratio} are both given: give one")
        if not problems and self.num_decay_steps < 1:
            problems.append(f"the decay must take at least 1 step, not {self.num_decay_steps}; for no decay use Constant")
        if self.shape not in _SHAPES:
            problems.append(f"shape {self.shape!r} is unknown: use one of {sorted(_SHAPES)}")
        if not problems and self.total_steps is not None and self.num_warmup_steps + self.num_decay_steps > self.total_steps:
            taken = f"{self.num_warmup_steps} steps of warm-up and {self.num_decay_steps} of decay"
            problems.append(f"{taken} do not fit in total_steps={self.total_steps}")
        return problems

    def _ratios(self) -> list[tuple[str, float]]:
        return super()._ratios() + ([("decay_ratio", self.decay_ratio)] if self.decay_ratio is not None else [])


def learning_rate(lr: LearningRate | float, step: int) -> float:
    """The rate of step `step`, which counts from 1; `lr` is a LearningRate, or a number for a constant rate."""
    return lr(step) if isinstance(lr, LearningRate) else float(lr)


def _share(ratio: float, total: int) -> int:
    """`ratio * total` rounded up, but without errors of rounding: 0.07 * 100 = 7.000000000000001 gives 7."""
    return math.ceil(ratio * total - 1e-9 * total)
