"""Learning rates: pure functions from the number of an update to a rate. Update 1 is the first one.

With `w` warm-up steps, `T` total steps and peak `lr`, the same for every one:

    update 1      lr / w          (warm-up is linear from 0, which would be update 0 and is never made)
    update w      lr
    update T      the minimum     (constant: lr)
    after T       the minimum

Without warm-up the peak belongs to update 0, so update 1 has already left it. transformers' schedulers give update `n` the value
at `n - 1` (their first update has rate 0 when there is warm-up); at equal arguments the formulas agree where both define one.
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
    """What all learning rates share. `rate(step)` is that of update `step`, which counts from 1.

    lr:            the peak rate.
    total_steps:   the last update; only Constant can do without (then `warmup_ratio` cannot be used).
    warmup_steps, warmup_ratio:  at most one of them; the ratio is of `total_steps`, rounded up to at most all but one.
    min_lr, min_ratio:           at most one of them; the ratio is of `lr`; default 0.

    Raises ConfigError, listing everything that is wrong, when made; `step` < 1 raises ConfigError when called.
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
        """The learning rate of update `step`."""
        if step < 1:
            raise ConfigError(f"{type(self).__name__}: there is no update {step}; the first update is step 1")
        warmup = self.num_warmup_steps
        return self.lr * step / warmup if step < warmup else self._after_warmup(step)

    @property
    def num_warmup_steps(self) -> int:
        """The update that is the first to have the peak rate; 0 without warm-up."""
        if self.warmup_ratio is not None:
            total = self.total_steps or 0
            share = _share(self.warmup_ratio, total)
            return min(share, total - 1) if self.warmup_ratio < 1 else share  # a step is left even of a very short run
        return self.warmup_steps or 0

    @property
    def minimum(self) -> float:
        """The rate of update `total_steps` and of all after it."""
        return self.lr * self.min_ratio if self.min_ratio is not None else self.min_lr or 0.0

    def _after_warmup(self, step: int) -> float:
        raise NotImplementedError

    def _between(self, shape: DecayShape, start: int, step: int) -> float:
        """From `lr` at update `start` to the minimum at `total_steps`, along `shape`."""
        assert self.total_steps is not None
        if step >= self.total_steps:
            return self.minimum
        part = _SHAPES[shape]((step - start) / (self.total_steps - start)) if step > start else 1.0
        return min(self.lr, self.minimum + (self.lr - self.minimum) * part)  # the rounded sum may pass the peak by one bit

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
    """Warm-up, then `lr` for ever. It takes no minimum."""

    def _after_warmup(self, step: int) -> float:
        return self.lr

    def _problems(self) -> list[str]:
        given = [name for name in ("min_lr", "min_ratio") if getattr(self, name) is not None]
        return super()._problems() + [f"a constant rate has no {name}: use Linear, Cosine or WSD" for name in given]


@dataclass(frozen=True, kw_only=True)
class _Decaying(LearningRate):
    """A rate that reaches its minimum at `total_steps`, which it needs."""

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
    """Warm-up, stable, decay: `lr` until update `total_steps - num_decay_steps`, then `shape` to the minimum.

    One of `decay_steps` and `decay_ratio` (of `total_steps`, rounded up; default 0.1) gives the length of the decay.
    """

    decay_steps: int | None = None
    decay_ratio: float | None = None
    shape: DecayShape = "linear"

    @property
    def num_decay_steps(self) -> int:
        """How many updates have a rate below the peak at the end."""
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
    """The rate of update `step` (the first is 1) of a LearningRate, or of a plain number, which is constant."""
    return lr(step) if isinstance(lr, LearningRate) else float(lr)


def _share(ratio: float, total: int) -> int:
    """`ratio * total` rounded up, except that 0.07 * 100 = 7.000000000000001 is 7."""
    return math.ceil(ratio * total - 1e-9 * total)
