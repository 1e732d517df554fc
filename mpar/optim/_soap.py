"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner (Vyas et al. 2024, arXiv:2409.11321, alg. 3)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mpar.chain import Axes
from mpar.ops import eigenbasis, einsum
from mpar.optim._adamw import AdamW
from mpar.optim._learning_rate import LearningRate
from mpar.optim._matrix_sides import matrix_sides
from mpar.optim._settings import ClippedOptimizer, WeightDecayMask, check_settings
from mpar.optimizer import LeafRule

__all__ = ["SOAP", "SoapMatrix"]

_SLOTS = ("m", "v", "left", "right", "left_basis", "right_basis")


@dataclass(frozen=True)
class SoapMatrix(LeafRule):
    """The rule of SOAP for a matrix, or for several that are counted by the first dims of a parameter.

    rows, columns: how many dims are the rows and the columns of a matrix: the last dims of the parameter.
    """

    rows: int
    columns: int
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    precondition_frequency: int

    slots: ClassVar[tuple[str, ...]] = _SLOTS

    def slot_dims(self, slot: str, ndim: int) -> tuple[int, ...]:
        """`left` and its basis have the rows twice, `right` and its basis the columns."""
        first, middle = ndim - self.rows - self.columns, ndim - self.columns
        sides = {"left": range(first, middle), "right": range(middle, ndim)}
        side = sides.get(slot.removesuffix("_basis"))
        return tuple(range(ndim)) if side is None else (*range(first), *side, *side)

    def update_leaf(
        self, param: Tensor, grad: Tensor, slots: tuple[Tensor, ...], lr: Tensor, step: Tensor, scale: Tensor, *, decays: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`(new param, new slots)` of one parameter; `lr`, `step` (1 at the first update) and `scale` are scalars.

        Where the parameter is sharded, lowering gathers the bases and adds the sums that the products need.
        """
        m, v, left, right, left_basis, right_basis = slots
        (beta1, beta2), every = self.betas, self.precondition_frequency
        grad = grad.to(param.dtype) * scale.to(param.dtype)
        left_basis = eigenbasis(left, left_basis, step, every=every, dims=self.rows)
        right_basis = eigenbasis(right, right_basis, step, every=every, dims=self.columns)
        m = beta1 * m + (1 - beta1) * grad
        rotated_grad, rotated_m = (self._rotated(x, left_basis, right_basis) for x in (grad, m))
        v = beta2 * v + (1 - beta2) * rotated_grad.square()
        first, second = ((1 - beta ** step.to(torch.float64)).to(param.dtype) for beta in (beta1, beta2))
        direction = self._rotated(rotated_m / first / ((v / second).sqrt() + self.eps), left_basis, right_basis, back=True)
        kept = param * (1 - lr * self.weight_decay).to(param.dtype) if decays and self.weight_decay else param
        left = beta2 * left + (1 - beta2) * self._square(grad, rows=True)
        right = beta2 * right + (1 - beta2) * self._square(grad, rows=False)
        return kept - lr.to(param.dtype) * direction, (m, v, left, right, left_basis, right_basis)

    def _letters(self, ndim: int) -> tuple[str, str, str, str, str]:
        """The letters of the dims that count matrices, of rows, of columns, and of a second set of rows and of columns."""
        letters = [chr(ord("a") + i) for i in range(ndim + self.rows + self.columns)]
        first, middle = ndim - self.rows - self.columns, ndim - self.columns
        spans = ((0, first), (first, middle), (middle, ndim), (ndim, ndim + self.rows), (ndim + self.rows, len(letters)))
        many, rows, columns, more_rows, more_columns = ("".join(letters[start:end]) for start, end in spans)
        return many, rows, columns, more_rows, more_columns

    def _rotated(self, x: Tensor, left: Tensor, right: Tensor, *, back: bool = False) -> Tensor:
        """`left^T x right`, or `left x right^T` with `back`: one side after the other."""
        many, r, c, p, q = self._letters(x.ndim)
        left_dims, right_dims = (f"{many}{p}{r}", f"{many}{q}{c}") if back else (f"{many}{r}{p}", f"{many}{c}{q}")
        half = einsum(f"{many}{r}{c},{left_dims}->{many}{p}{c}", x, left)
        return einsum(f"{many}{p}{c},{right_dims}->{many}{p}{q}", half, right)

    def _square(self, grad: Tensor, *, rows: bool) -> Tensor:
        """`grad grad^T`, or `grad^T grad` where it is not of the rows."""
        many, r, c, p, q = self._letters(grad.ndim)
        other, result = (f"{many}{p}{c}", f"{many}{r}{p}") if rows else (f"{many}{r}{q}", f"{many}{c}{q}")
        return einsum(f"{many}{r}{c},{other}->{result}", grad, grad)


@dataclass(frozen=True)
class SOAP(ClippedOptimizer):
    """A pure optimizer: it holds hyperparameters; its state is an argument and a result.

        m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) (Q^T g R)^2
        p <- p (1 - lr weight_decay) - lr Q [(Q^T m R / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)] R^T
        L <- b2 L + (1 - b2) g g^T;  K <- b2 K + (1 - b2) g^T g

    Q and R are the eigenvectors of L and K. They begin as the identity, so that the first steps are those of Adam; after
    `precondition_frequency` steps they are computed, and after as many steps again they follow by one round of power iteration
    with QR. That is the rule for matrices of hidden layers, which are the same as in Muon; all other parameters take AdamW, with
    the same fields. A matrix of m x n keeps 2 (m n + m^2 + n^2) numbers.

    The code of the authors differs: it has eigenvectors from the first gradient, for which it skips the first step, sorts the
    columns of Q by their estimated eigenvalue at every power iteration, and has no preconditioner for dims above 10,000.
    The fields mean the same as in AdamW. Raises ConfigError, which lists everything that is wrong.
    """

    lr: LearningRate | float
    betas: tuple[float, float] = (0.95, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01
    precondition_frequency: int = 10
    decay: WeightDecayMask = "by_rank"
    clip_norm: float | None = 1.0

    slots: ClassVar[tuple[str, ...]] = _SLOTS

    def __post_init__(self) -> None:
        problems = [f"betas must be in [0, 1), not {beta}" for beta in self.betas if not 0 <= beta < 1]
        if self.precondition_frequency < 1:
            problems.append(f"precondition_frequency must be at least 1, not {self.precondition_frequency}")
        check_settings(
            self,
            lr=self.lr,
            decay=self.decay,
            clip_norm=self.clip_norm,
            not_negative={"eps": self.eps, "weight_decay": self.weight_decay},
            problems=problems,
        )

    def leaf_rule(self, path: str, axes: Axes) -> LeafRule:
        """SoapMatrix for a matrix of a hidden layer, AdamW for every other parameter; `Muon.leaf_rule` says which is which."""
        sides = matrix_sides(path, axes)
        if len(sides) != 2:
            return AdamW(self.lr, self.betas, self.eps, self.weight_decay, self.decay, self.clip_norm)
        rows, columns = sides
        return SoapMatrix(rows, columns, self.betas, self.eps, self.weight_decay, self.precondition_frequency)

    def update_leaf(
        self, param: Tensor, grad: Tensor, slots: tuple[Tensor, ...], lr: Tensor, step: Tensor, scale: Tensor, *, decays: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The update of a hidden matrix with two dims; others are updated by their `leaf_rule`."""
        return self.leaf_rule("", (None, None)).update_leaf(param, grad, slots, lr, step, scale, decays=decays)
