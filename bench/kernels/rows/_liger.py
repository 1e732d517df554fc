"""Liger kernels, where they are installed; see `bench/_liger.py`."""

from bench._liger import NOT_INSTALLED, liger

__all__ = ["NOT_INSTALLED", "liger"]
