"""Products, statistics and updates."""

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.functions._case import Function, fixed, real

__all__ = ["ALGEBRA"]


def swiglu_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """As in Llama."""
    return (F.silu(x @ gate) * (x @ up)) @ down


def lora(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A frozen weight and an update of rank 4."""
    return x @ weight + 2.0 * (x @ a) @ b


def bilinear(x: Tensor, kernel: Tensor, y: Tensor) -> Tensor:
    """A product of three operands."""
    return torch.einsum("bsi,ijr,bsj->bsr", x, kernel, y)


def barlow_twins(a: Tensor, b: Tensor) -> Tensor:
    """The correlation of all pairs of features of two views should be the identity."""
    a, b = (a - a.mean(0)) / a.std(0), (b - b.mean(0)) / b.std(0)
    correlation = a.T @ b / len(a)
    on_diagonal = torch.diagonal(correlation)
    return (on_diagonal - 1).square().sum() + 0.005 * (correlation.square().sum() - on_diagonal.square().sum())


def mean_of_halves(x: Tensor) -> Tensor:
    """A mean over so many fp16 numbers that their sum is too large for fp16."""
    return (x.abs() + 8).mean(-1)


def feature_statistics(x: Tensor) -> dict[str, Tensor]:
    """What people log of activations."""
    return {
        "std": x.std((0, 1)),
        "variance": x.var((1, 2)),
        "largest": x.abs().amax(),
        "norm": x.norm(dim=-1).mean(),
        "kurtosis": (x**4).mean((0, 1)) / (x**2).mean((0, 1)).square(),
        "softened_maximum": x.logsumexp(2),
    }


def clip_and_average(up: Tensor, down: Tensor, up_average: Tensor, down_average: Tensor) -> dict[str, Tensor]:
    """Gradients of global norm 1 at most, and their moving averages."""
    grads, averages = {"up": up, "down": down}, {"up": up_average, "down": down_average}
    norm = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()
    scale = (1.0 / (norm + 1e-6)).clamp(max=1.0)
    return {"norm": norm} | {name: torch.lerp(averages[name], g * scale, 0.1) for name, g in grads.items()}


def newton_schulz(weight: Tensor) -> Tensor:
    """As in Muon: the nearest matrix with orthogonal rows."""
    x = weight / weight.norm()
    for _ in range(3):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x


_X, _WIDE = real("batch seq embed"), real("embed mlp")

ALGEBRA = (
    Function(swiglu_mlp, (_X, _WIDE, _WIDE, real("mlp embed"))),
    Function(lora, (_X, fixed("embed mlp"), real("embed rank"), real("rank mlp"))),
    Function(bilinear, (_X, real("embed hidden rank"), real("batch seq hidden"))),
    Function(barlow_twins, (real("batch hidden"), real("batch embed"))),
    Function(mean_of_halves, (real("batch heads long", dtype=torch.float16),)),
    Function(feature_statistics, (real("batch seq hidden"),)),
    Function(clip_and_average, (_WIDE, real("mlp embed"), _WIDE, real("mlp embed"))),
    Function(newton_schulz, (real("embed mlp"),)),
)
