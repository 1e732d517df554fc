"""Places: the logical axes of activations between parts and within them."""

from mpar.chain import Axes

__all__ = ["BLOCK", "RESIDUAL"]

RESIDUAL: Axes = ("batch", "residual_seq", "embed")
BLOCK: Axes = ("batch", "seq", "embed")
