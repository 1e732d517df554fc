"""Precision: the dtypes in which parameters are used and gradients are reduced. The stored parameters keep their own dtype."""

import fnmatch
from dataclasses import dataclass

import torch

from mpar.errors import UnknownNameError

__all__ = ["Precision", "precision"]


@dataclass(frozen=True)
class Precision:
    """The dtypes of a compiled step.

    compute: that of parameters and activations while they are used (None: as stored).
    grad:    that in which gradients are reduced and stored (None: that of the stored parameter).
    table:   (pattern, dtype) pairs that override `compute`: the first pattern that a parameter's path matches counts.
    """

    compute: torch.dtype | None = None
    grad: torch.dtype | None = None
    table: tuple[tuple[str, torch.dtype], ...] = ()

    def compute_dtype(self, path: str, stored: torch.dtype) -> torch.dtype:
        """The dtype in which the parameter at `path` is used; integers are used as they are stored."""
        if not stored.is_floating_point:
            return stored
        for pattern, dtype in self.table:
            if fnmatch.fnmatchcase(path, pattern):
                return dtype
        return self.compute or stored

    def grad_dtype(self, stored: torch.dtype) -> torch.dtype:
        """The dtype of the stored gradient of a parameter."""
        return self.grad or stored


_NAMES = {
    "fp32": Precision(),
    "bf16": Precision(compute=torch.bfloat16),
}


def precision(name: str | Precision | None) -> Precision:
    """A precision by name: fp32 (everything as stored) or bf16 (compute in bfloat16, parameters as stored)."""
    if isinstance(name, Precision):
        return name
    if name is not None and name not in _NAMES:
        raise UnknownNameError(f"no precision is called {name!r}; there are {', '.join(_NAMES)}")
    return _NAMES[name or "fp32"]
