"""AdamW: Adam with decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101, alg. 2), as in torch.optim.AdamW."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from mpar.ops import adamw
from mpar.optim._schedule import Schedule, learning_rate
from mpar.optim._tree import (
    OptState,
    WeightDecayMask,
    clip_factor,
    decays,
    mask_problems,
    raise_problems,
    step_zero,
    update_leaves,
    zeros_like_params,
)

__all__ = ["AdamW"]


@dataclass(frozen=True)
class AdamW:
    """A pure optimizer: hyperparameters here, state outside.

        p <- p (1 - lr weight_decay);  m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2
        p <- p - lr (m / (1 - b1^step)) / (sqrt(v / (1 - b2^step)) + eps)

    lr:         a schedule, or a constant rate.
    decay:      which parameters decay, see WeightDecayMask.
    clip_norm:  the bound on the global gradient norm; None does not clip. `update` does not clip by itself: its caller
                computes the norm (`global_norm`, `clip_factor`) and hands in `scale`.
    Raises ConfigError, listing everything that is wrong.
    """

    lr: Schedule | float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay: WeightDecayMask = "by_rank"
    clip_norm: float | None = 1.0

    slots: ClassVar[tuple[str, ...]] = ("m", "v")

    def __post_init__(self) -> None:
        problems = mask_problems(self.decay)
        problems += [f"betas must be in [0, 1), not {beta}" for beta in self.betas if not 0 <= beta < 1]
        bounds = [("eps", self.eps), ("weight_decay", self.weight_decay)]
        bounds += [] if isinstance(self.lr, Schedule) else [("lr", self.lr)]
        problems += [f"{name} must not be negative, not {value}" for name, value in bounds if not value >= 0]
        if self.clip_norm is not None and not self.clip_norm > 0:
            problems.append(f"clip_norm must be positive, not {self.clip_norm}; None does not clip")
        raise_problems(self, problems)

    def init(self, params: Any) -> OptState:
        """State before the first update: zeros like `params`, which are float32 or float64 (else DtypeError)."""
        return OptState(step_zero(params), {slot: zeros_like_params("AdamW", params) for slot in self.slots})

    def update(self, grads: Any, state: OptState, params: Any, *, scale: Tensor | float = 1.0) -> tuple[Any, OptState]:
        """`(new_params, new_state)` after one update with `grads * scale`. Nothing that is passed in changes.

        `grads` is a tree like `params`; `scale` is the clip factor. Raises ShapeError if trees do not fit.
        """
        return update_leaves(self, grads, state, params, scale)

    def update_leaf(
        self, param: Tensor, grad: Tensor, slots: tuple[Tensor, ...], lr: Tensor, step: Tensor, scale: Tensor, *, decays: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`(new param, new slots)` of one parameter; `lr`, `step` (1 at the first update) and `scale` are scalars.

        Element-wise, so it may be given any shard of the parameter.
        """
        m, v = slots
        beta1, beta2 = self.betas
        weight_decay = self.weight_decay if decays else 0.0
        new_param, new_m, new_v = adamw(
            param, grad, m, v, lr, step, scale, beta1=beta1, beta2=beta2, eps=self.eps, weight_decay=weight_decay
        )
        return new_param, (new_m, new_v)

    def decays(self, path: str, leaf: Any) -> bool:
        """Whether the parameter at `path` decays; `leaf` is its tensor (a meta one will do) or the tuple of its logical axes."""
        return decays(self.decay, path, leaf)

    def rate(self, step: int) -> float:
        """The learning rate of update `step`, counted from 1."""
        return learning_rate(self.lr, step)

    def scale(self, norm: Tensor) -> Tensor:
        """What gradients of global `norm` are multiplied with: the clip factor, or 1."""
        return torch.ones_like(norm) if self.clip_norm is None else clip_factor(norm, self.clip_norm)
