"""Inductor: the code of a segment compiled once more, by torch.compile, which fuses what lies between primitives.

Primitives stay opaque: the code calls each as a torch op, whose results it knows from the abstract rule. Kernels get ops of their
own, so that what runs is what the program says.
"""

import functools
from collections.abc import Callable
from typing import TypeVar, cast

import torch

from mpar.kernels import implementation
from mpar.ops import PRIMITIVES

__all__ = ["compiled", "opaque"]

F = TypeVar("F", bound=Callable[..., object])
_LIBRARY = torch.library.Library("mpar_kernels", "DEF")


@functools.cache
def opaque(primitive: str, name: str) -> Callable[..., object]:
    """The torch op that carries out `primitive` by its implementation `name`."""
    reference = PRIMITIVES[primitive]  # whose own op chooses for itself on a GPU
    op = f"{primitive}_{name}"
    schema = str(reference.op._schema).removeprefix(f"mpar::{primitive}")
    _LIBRARY.define(f"{op}{schema}")
    _LIBRARY.impl(op, implementation(primitive, name), "CompositeExplicitAutograd")
    torch.library.register_fake(f"mpar_kernels::{op}", reference.abstract, lib=_LIBRARY)
    return getattr(torch.ops.mpar_kernels, op).default


def compiled(source: str, function: F) -> F:
    """`function` through Inductor, unless it overwrites operands by a primitive, which Inductor would take for a pure op."""
    if any(f"[{name!r}" in source for name, primitive in PRIMITIVES.items() if primitive.mutates):
        return function
    return cast(F, torch.compile(function, dynamic=False))
