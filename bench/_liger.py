"""Liger kernels (https://github.com/linkedin/Liger-Kernel), where they are installed."""

import importlib
import importlib.util
from typing import Any

__all__ = ["NOT_INSTALLED", "liger"]

NOT_INSTALLED = "not installed"


def liger(module: str, name: str) -> Any | None:
    """An attribute of a module of `liger_kernel`; None where that is not installed or incomplete, or has no such attribute."""
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    try:
        return getattr(importlib.import_module(f"liger_kernel.{module}"), name, None)
    except ImportError:  # raised for something that this module needs
        return None
