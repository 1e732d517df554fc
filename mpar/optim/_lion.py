"""Lion: steps by the sign of a momentum (Chen et al. 2023, arXiv:2302.06675, alg. 2)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mpar.optim._learning_rate import LearningRate
from mpar.optim._settings import ClippedOptimizer, WeightDecayMask, check_settings

__all__ = ["Lion"]


@dataclass(frozen=True)
class Lion(ClippedOptimizer):
    """A pure optimizer: it holds hyperparameters; its state is an argument and a result.

        u <- sign(b1 m + (1 - b1) g);  p <- p (1 - lr weight_decay) - lr u;  m <- b2 m + (1 - b2) g

    It keeps one tensor for each parameter. The paper takes a learning rate 3 to 10 times smaller than AdamW's, and a weight decay
    that is as many times larger. The fields mean the same as in AdamW. Raises ConfigError, which lists everything that is wrong.
    """

    lr: LearningRate | float
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.1
    decay: WeightDecayMask = "by_rank"
    clip_norm: float | None = 1.0

    slots: ClassVar[tuple[str, ...]] = ("m",)

    def __post_init__(self) -> None:
        check_settings(
            self,
            lr=self.lr,
            decay=self.decay,
            clip_norm=self.clip_norm,
            not_negative={"weight_decay": self.weight_decay},
            problems=[f"betas must be in [0, 1), not {beta}" for beta in self.betas if not 0 <= beta < 1],
        )

    def update_leaf(
        self, param: Tensor, grad: Tensor, slots: tuple[Tensor, ...], lr: Tensor, step: Tensor, scale: Tensor, *, decays: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`(new param, new slots)` of one parameter; `lr`, `step` (1 at the first update, not used) and `scale` are scalars.

        It computes element by element, so the tensors may be any shard of the parameter.
        """
        (m,) = slots
        beta1, beta2 = self.betas
        grad = grad.to(param.dtype) * scale.to(param.dtype)
        direction = torch.sign(beta1 * m + (1 - beta1) * grad)
        kept = param * (1 - lr * self.weight_decay).to(param.dtype) if decays and self.weight_decay else param
        return kept - lr.to(param.dtype) * direction, (beta2 * m + (1 - beta2) * grad,)
