"""Inference."""

from mpar.infer._generate import generate

__all__ = ["generate"]
