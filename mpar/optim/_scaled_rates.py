"""ScaledRates: an optimizer whose learning rate is multiplied by a factor for some parameters, such as B of LoRA+."""

import fnmatch
import math
from dataclasses import dataclass

from torch import Tensor

from mpar.chain import Axes
from mpar.errors import ConfigError
from mpar.optimizer import LeafRule, Optimizer, leaf_rule

__all__ = ["ScaledRates"]


@dataclass(frozen=True)
class ScaledRates(Optimizer):
    """`optimizer`, but the learning rate of a parameter is multiplied by the factor of the first pattern that its path matches.

    factors: (pattern, factor) pairs; patterns are as in fnmatch, such as `adapters.*.b`. Raises ConfigError for a factor that is
    not positive.
    """

    optimizer: Optimizer
    factors: tuple[tuple[str, float], ...]

    def __post_init__(self) -> None:
        wrong = [f"{pattern!r}: {factor}" for pattern, factor in self.factors if not 0 < factor < math.inf]
        if wrong:
            raise ConfigError(f"cannot multiply learning rates by {', '.join(wrong)}: factors are positive numbers")

    @property
    def slots(self) -> tuple[str, ...]:
        """Those of `optimizer`."""
        return self.optimizer.slots

    def leaf_rule(self, path: str, axes: Axes) -> LeafRule:
        """The rule of `optimizer`, with the factor of the parameter."""
        rule = leaf_rule(self.optimizer, path, axes)
        factor = next((factor for pattern, factor in self.factors if fnmatch.fnmatchcase(path, pattern)), 1.0)
        return rule if factor == 1 else ScaledRule(rule, factor)

    def update_leaf(
        self, param: Tensor, grad: Tensor, slots: tuple[Tensor, ...], lr: Tensor, step: Tensor, scale: Tensor, *, decays: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """That of `optimizer`; `leaf_rule` says which parameters have a factor."""
        return self.optimizer.update_leaf(param, grad, slots, lr, step, scale, decays=decays)

    def slot_dims(self, slot: str, ndim: int) -> tuple[int, ...]:
        """Those of `optimizer`."""
        return self.optimizer.slot_dims(slot, ndim)

    def decays(self, path: str, leaf: Tensor | Axes) -> bool:
        """As `optimizer`."""
        return self.optimizer.decays(path, leaf)

    def rate(self, step: int) -> float:
        """The rate of parameters without a factor."""
        return self.optimizer.rate(step)

    def scale(self, norm: Tensor) -> Tensor:
        """As `optimizer`."""
        return self.optimizer.scale(norm)


@dataclass(frozen=True)
class ScaledRule(LeafRule):
    """`rule` with a learning rate that is multiplied by `factor`."""

    rule: LeafRule
    factor: float

    @property
    def slots(self) -> tuple[str, ...]:
        """Those of `rule`."""
        return self.rule.slots

    def update_leaf(
        self, param: Tensor, grad: Tensor, slots: tuple[Tensor, ...], lr: Tensor, step: Tensor, scale: Tensor, *, decays: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """That of `rule`."""
        return self.rule.update_leaf(param, grad, slots, lr * self.factor, step, scale, decays=decays)

    def slot_dims(self, slot: str, ndim: int) -> tuple[int, ...]:
        """Those of `rule`."""
        return self.rule.slot_dims(slot, ndim)
