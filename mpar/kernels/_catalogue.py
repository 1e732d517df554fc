"""Catalogue: which implementations a primitive has besides its reference, where each is, and what it supports.

It needs no Triton: a program for any chip is compiled on any machine.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["CATALOGUE", "Implementation"]

Supports = Callable[..., str | None]
"""`supports(arch, *operands, **params)`, with operands without data: why the kernel cannot do this, or None if it can."""


@dataclass(frozen=True)
class Implementation:
    """`function` of `module` carries out a primitive: same operands, parameters and results as its `def_impl`.

    `workspace(*operands, **params)`: bytes that it allocates and frees within a call.
    """

    name: str
    module: str
    function: str
    supports: Supports
    workspace: Callable[..., int] = lambda *operands, **params: 0

    def load(self) -> Callable[..., Any]:
        """The function; imports Triton."""
        return getattr(importlib.import_module(self.module), self.function)


def floating(arch: str, *operands: Tensor | list[Tensor] | None, **_: Any) -> str | None:
    """All floating operands are float32, float16 or bfloat16."""
    tensors = [x for operand in operands for x in (operand if isinstance(operand, (list, tuple)) else [operand])]
    wrong = {x.dtype for x in tensors if x is not None and x.is_floating_point()} - {torch.float32, torch.float16, torch.bfloat16}
    return f"kernels compute in float32 and take no {', '.join(sorted(map(str, wrong)))}" if wrong else None


def _triton(primitive: str, module: str, supports: Supports = floating) -> tuple[str, tuple[Implementation, ...]]:
    return primitive, (Implementation("triton", f"mpar.kernels.{module}", primitive, supports),)


CATALOGUE: Mapping[str, tuple[Implementation, ...]] = dict(
    [
        _triton("swiglu", "_swiglu"),
        _triton("swiglu_bwd", "_swiglu"),
    ]
)
"""Implementations of each primitive, best first: `kernels=auto` takes the first that supports the call."""
