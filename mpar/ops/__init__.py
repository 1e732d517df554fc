"""Primitives: every op that has rules of its own, one file each."""

from mpar.ops._einsum import einsum
from mpar.ops._rms_norm import rms_norm

__all__ = ["einsum", "rms_norm"]
