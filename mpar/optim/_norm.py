"""The global norm of gradients, and the factor that clips it."""

import torch
from torch import Tensor

from mpar import tree
from mpar.errors import ShapeError
from mpar.ops import sum_squares
from mpar.tree import Tree

__all__ = ["clip_factor", "global_norm"]


def global_norm(grads: Tree) -> Tensor:
    """The Euclidean norm of all leaves of `grads` together: a scalar, float32 or wider.

    The sums of squares are added in the order of the leaves, as a compiled program does.
    Raises ShapeError if there is no leaf.
    """
    squares = [sum_squares(grad) for grad in tree.leaves(grads)]
    if not squares:
        raise ShapeError("global_norm: the tree of gradients has no leaf, so it has no norm")
    total = squares[0]
    for square in squares[1:]:
        total = total + square
    return total.sqrt()


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """`min(1, max_norm / (norm + 1e-6))`: multiplied by it, gradients of global `norm` have at most the norm `max_norm`.

    The same formula as torch.nn.utils.clip_grad_norm_. A norm that is not finite gives 0 or NaN: check it first.
    """
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
