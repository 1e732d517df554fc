"""Derivatives inside a function: of second order, along a direction, of each sample."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, hessian, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

from bench.functions._case import Function, fixed, real

__all__ = ["DERIVATIVES"]


def gradient_penalty(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """As for Wasserstein critics: the slope of each sample should be 1."""
    slope = grad(lambda x: (torch.tanh(x @ weight) @ out).sum())(x)
    return (torch.linalg.vector_norm(slope, dim=-1) - 1).square().mean()


def hessian_vector_product(up: Tensor, down: Tensor, x: Tensor, y: Tensor, direction: Tensor) -> Tensor:
    """Forward over reverse."""
    return jvp(grad(lambda up: _regression(up, down, x, y)), (up,), (direction,))[1]


def directional_derivative(x: Tensor, direction: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """A network's output and its change along a direction."""
    return jvp(lambda x: F.gelu(x @ up) @ down, (x,), (direction,))


def per_sample_gradients(up: Tensor, down: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """As for differential privacy: the gradient of each sample, clipped, and their mean."""

    def loss(weights: tuple[Tensor, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return _regression(*weights, x, y)

    first, second = vmap(grad(loss), in_dims=(None, 0, 0))((up, down), x, y)
    norm = (first.square().sum((1, 2)) + second.square().sum((1, 2))).sqrt()
    return torch.einsum("b,bij->ij", (1 / norm).clamp(max=1.0), first) / len(x)


def maml_step(up: Tensor, down: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The loss after one step on the same data."""
    step = grad(_regression, argnums=(0, 1))(up, down, x, y)
    return _regression(up - 0.1 * step[0], down - 0.1 * step[1], x, y)


def newton_direction(weight: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient and Hessian of a logistic regression."""

    def loss(weight: Tensor) -> Tensor:
        return F.softplus(x @ weight).mean() - (torch.sigmoid(y) * (x @ weight)).mean()

    return grad(loss)(weight), hessian(loss)(weight)


def contractive_penalty(x: Tensor, up: Tensor) -> Tensor:
    """As for contractive autoencoders: the squared Jacobian of each sample."""
    jacobian = vmap(jacrev(lambda x: torch.sigmoid(x @ up)))(x)
    return jacobian.square().sum((1, 2)).mean()


def checkpointed_mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """A block that is computed again for its gradient."""
    return x + checkpoint(lambda x: F.gelu(x @ up) @ down, x, use_reentrant=False)


def _regression(up: Tensor, down: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return (torch.tanh(x @ up) @ down - y).square().mean()


_X, _Y, _UP, _DOWN = real("batch embed"), fixed("batch out"), real("embed mlp"), real("mlp out")

DERIVATIVES = (
    Function(gradient_penalty, (_X, _UP, real("mlp"))),
    Function(hessian_vector_product, (_UP, _DOWN, fixed("batch embed"), _Y, fixed("embed mlp"))),
    Function(directional_derivative, (real("batch seq embed"), fixed("batch seq embed"), _UP, real("mlp embed"))),
    Function(per_sample_gradients, (_UP, _DOWN, fixed("batch embed"), _Y)),
    Function(maml_step, (_UP, _DOWN, fixed("batch embed"), _Y)),
    Function(newton_direction, (real("classes"), fixed("batch classes"), fixed("batch"))),
    Function(contractive_penalty, (_X, _UP)),
    Function(checkpointed_mlp, (real("batch seq embed"), _UP, real("mlp embed"))),
)
