"""Stochastic gradient descent with momentum, Nesterov's or plain, and L2 weight decay: the rules of torch.optim.SGD."""

from dataclasses import dataclass

from torch import Tensor

from mpar.ops import sgd
from mpar.optim._learning_rate import LearningRate
from mpar.optim._settings import ClippedOptimizer, WeightDecayMask, check_settings

__all__ = ["SGD"]


@dataclass(frozen=True)
class SGD(ClippedOptimizer):
    """A pure optimizer: it holds hyperparameters; its state is an argument and a result.

        g <- g + weight_decay p;  u <- momentum u + g;  p <- p - lr u        (nesterov: p <- p - lr (g + momentum u))

    Without momentum (u = g) the only state is the number of the step. With momentum, an update is one call of primitive `sgd`.
    The fields mean the same as in AdamW, but weight decay is added to the gradient, so that it enters the momentum.
    Raises ConfigError, which lists everything that is wrong.
    """

    lr: LearningRate | float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    decay: WeightDecayMask = "by_rank"
    clip_norm: float | None = 1.0

    def __post_init__(self) -> None:
        check_settings(
            self,
            lr=self.lr,
            decay=self.decay,
            clip_norm=self.clip_norm,
            not_negative={"momentum": self.momentum, "weight_decay": self.weight_decay},
            problems=["nesterov=True needs momentum, which is 0"] if self.nesterov and not self.momentum else [],
        )

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of the state kept for each parameter."""
        return ("momentum",) if self.momentum else ()

    def update_leaf(
        self, param: Tensor, grad: Tensor, slots: tuple[Tensor, ...], lr: Tensor, step: Tensor, scale: Tensor, *, decays: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`(new param, new slots)` of one parameter; `lr`, `step` (1 at the first update, not used) and `scale` are scalars.

        It computes element by element, so the tensors may be any shard of the parameter.
        """
        weight_decay = self.weight_decay if decays else 0.0
        if self.momentum:
            new_param, buffer = sgd(
                param, grad, slots[0], lr, scale, momentum=self.momentum, weight_decay=weight_decay, nesterov=self.nesterov
            )
            return new_param, (buffer,)
        direction = grad.to(param.dtype) * scale.to(param.dtype)
        if weight_decay:
            direction = direction + weight_decay * param
        return param - lr.to(param.dtype) * direction, ()
