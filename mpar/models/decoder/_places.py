"""Logical axes of activations: of the residual stream between parts, and of the input of a part."""

from mpar.chain import Axes

__all__ = ["BLOCK", "RESIDUAL"]

RESIDUAL: Axes = ("batch", "residual_seq", "embed")
BLOCK: Axes = ("batch", "seq", "embed")
