"""Muon: matrices step by their orthogonalised momentum (Jordan et al. 2024, "Muon"), as in torch.optim.Muon; others by AdamW."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from mpar.chain import Axes
from mpar.ops import newton_schulz
from mpar.optim._adamw import AdamW
from mpar.optim._learning_rate import LearningRate
from mpar.optim._matrix_sides import matrix_sides
from mpar.optim._settings import ClippedOptimizer, WeightDecayMask, check_settings
from mpar.optimizer import LeafRule

__all__ = ["Muon", "MuonMatrix"]


@dataclass(frozen=True)
class MuonMatrix(LeafRule):
    """The rule of Muon for a matrix, or for several that are counted by the first dims of a parameter.

    rows, columns: how many dims are the rows and the columns of a matrix: the last dims of the parameter.
    """

    rows: int
    columns: int
    momentum: float
    nesterov: bool
    weight_decay: float
    num_rounds: int
    adjust_lr: str
    narrow: bool

    slots: ClassVar[tuple[str, ...]] = ("momentum",)

    def update_leaf(
        self, param: Tensor, grad: Tensor, slots: tuple[Tensor, ...], lr: Tensor, step: Tensor, scale: Tensor, *, decays: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`(new param, new slots)` of one parameter; `lr`, `step` (not used) and `scale` are scalars.

        Where the parameter is sharded, lowering gathers what is orthogonalised, once. All ranks orthogonalise the same bits.
        """
        grad = grad.to(param.dtype) * scale.to(param.dtype)
        momentum = slots[0] + (1 - self.momentum) * (grad - slots[0])
        direction = grad + self.momentum * (momentum - grad) if self.nesterov else momentum
        direction = newton_schulz(direction, rows=self.rows, columns=self.columns, num_rounds=self.num_rounds, narrow=self.narrow)
        middle = param.ndim - self.columns
        num_in, num_out = math.prod(param.shape[middle - self.rows : middle]), math.prod(param.shape[middle:])
        factor = 0.2 * max(num_in, num_out) ** 0.5 if self.adjust_lr == "match_rms_adamw" else max(1.0, num_out / num_in) ** 0.5
        kept = param * (1 - lr * self.weight_decay).to(param.dtype) if decays and self.weight_decay else param
        return kept - (lr * factor).to(param.dtype) * direction, (momentum,)


@dataclass(frozen=True)
class Muon(ClippedOptimizer):
    """A pure optimizer: it holds hyperparameters; its state is an argument and a result.

        m <- momentum m + (1 - momentum) g;  u <- momentum m + (1 - momentum) g   (without nesterov: u <- m)
        p <- p (1 - lr weight_decay) - lr factor newton_schulz(u)

    That is the rule for matrices of hidden layers. Embeddings, heads, norms, biases and filters of convolutions take AdamW, with
    `betas` and `eps`; see `leaf_rule`. A matrix keeps one tensor, `momentum`, the others `m` and `v`.

    adjust_lr:  the factor: "match_rms_adamw" is 0.2 sqrt(max(in, out)), so that a rate of AdamW fits (Liu et al. 2025,
                arXiv:2502.16982); "original" is sqrt(max(1, out / in)).
    num_rounds: of Newton-Schulz.
    narrow:     Newton-Schulz computes in bfloat16, as in torch; else in the dtype of the parameter.
    The other fields mean the same as in AdamW. Raises ConfigError, which lists everything that is wrong.
    """

    lr: LearningRate | float
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.1
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    num_rounds: int = 5
    narrow: bool = True
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    decay: WeightDecayMask = "by_rank"
    clip_norm: float | None = 1.0

    slots: ClassVar[tuple[str, ...]] = ("momentum", "m", "v")

    def __post_init__(self) -> None:
        problems = [f"betas must be in [0, 1), not {beta}" for beta in self.betas if not 0 <= beta < 1]
        problems += [] if 0 <= self.momentum < 1 else [f"momentum must be in [0, 1), not {self.momentum}"]
        problems += [] if self.num_rounds >= 1 else [f"num_rounds must be at least 1, not {self.num_rounds}"]
        if self.adjust_lr not in ("match_rms_adamw", "original"):
            problems.append(f"adjust_lr must be 'match_rms_adamw' or 'original', not {self.adjust_lr!r}")
        check_settings(
            self,
            lr=self.lr,
            decay=self.decay,
            clip_norm=self.clip_norm,
            not_negative={"eps": self.eps, "weight_decay": self.weight_decay},
            problems=problems,
        )

    def leaf_rule(self, path: str, axes: Axes) -> LeafRule:
        """MuonMatrix for a matrix of a hidden layer, AdamW for every other parameter.

        No such matrix is a parameter with an axis `vocab`, one in the part `embed` or `head` of a model, or one with `bias` or
        `conv` in its name. A dim of heads and the dim of their features after it are one side of a matrix, which is the one that
        torch.nn.Linear stores, transposed: `q_DNH` is D x (N H), `o_NHD` is (N H) x D. A dim of experts counts matrices.
        """
        sides = matrix_sides(path, axes)
        if len(sides) != 2:
            return AdamW(self.lr, self.betas, self.eps, self.weight_decay, self.decay, self.clip_norm)
        rows, columns = sides
        return MuonMatrix(
            rows=rows,
            columns=columns,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            num_rounds=self.num_rounds,
            adjust_lr=self.adjust_lr,
            narrow=self.narrow,
        )

    def update_leaf(
        self, param: Tensor, grad: Tensor, slots: tuple[Tensor, ...], lr: Tensor, step: Tensor, scale: Tensor, *, decays: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The update of a hidden matrix with two dims, `slots` being its momentum; others are updated by their `leaf_rule`."""
        rule = self.leaf_rule("", (None, None))
        return rule.update_leaf(param, grad, slots, lr, step, scale, decays=decays)
