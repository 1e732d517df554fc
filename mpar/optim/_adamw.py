"""AdamW: Adam with decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101, alg. 2), as in torch.optim.AdamW."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mpar.ops import adamw
from mpar.optim._learning_rate import LearningRate
from mpar.optim._settings import ClippedOptimizer, WeightDecayMask, check_settings

__all__ = ["AdamW"]


@dataclass(frozen=True)
class AdamW(ClippedOptimizer):
    """A pure optimizer: it holds hyperparameters; its state is an argument and a result.

        p <- p (1 - lr weight_decay);  m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2
        p <- p - lr (m / (1 - b1^step)) / (sqrt(v / (1 - b2^step)) + eps)

    lr:         a LearningRate, or a number for a constant rate.
    decay:      which parameters have weight decay, see WeightDecayMask.
    clip_norm:  the bound on the global norm of gradients; None does not clip. `update` does not clip by itself: its caller
                computes the norm (`global_norm`) and passes the factor that clips (`scale`, `clip_factor`).
    Raises ConfigError, which lists everything that is wrong.
    """

    lr: LearningRate | float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay: WeightDecayMask = "by_rank"
    clip_norm: float | None = 1.0

    slots: ClassVar[tuple[str, ...]] = ("m", "v")

    def __post_init__(self) -> None:
        check_settings(
            self,
            lr=self.lr,
            decay=self.decay,
            clip_norm=self.clip_norm,
            not_negative={"eps": self.eps, "weight_decay": self.weight_decay},
            problems=[f"betas must be in [0, 1), not {beta}" for beta in self.betas if not 0 <= beta < 1],
        )

    def update_leaf(
        self, param: Tensor, grad: Tensor, slots: tuple[Tensor, ...], lr: Tensor, step: Tensor, scale: Tensor, *, decays: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`(new param, new slots)` of one parameter; `lr`, `step` (1 at the first update) and `scale` are scalars.

        It computes element by element, so the tensors may be any shard of the parameter.
        """
        m, v = slots
        beta1, beta2 = self.betas
        weight_decay = self.weight_decay if decays else 0.0
        new_param, new_m, new_v = adamw(
            param, grad, m, v, lr, step, scale, beta1=beta1, beta2=beta2, eps=self.eps, weight_decay=weight_decay
        )
        return new_param, (new_m, new_v)
