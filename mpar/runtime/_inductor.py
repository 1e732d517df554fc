"""Inductor: torch.compile compiles the code of a segment further, and fuses the operations between primitives.

Primitives stay opaque: the code calls each as a torch op, and Inductor knows the shapes of its results from its abstract rule.
Every kernel gets a torch op of its own, so that the implementations that run are those that the program names.
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
    """The torch op that calls the implementation `name` of `primitive`."""
    reference = PRIMITIVES[primitive]  # its own torch op would choose an implementation itself on a GPU
    op = f"{primitive}_{name}"
    schema = str(reference.op._schema).removeprefix(f"mpar::{primitive}")
    _LIBRARY.define(f"{op}{schema}")
    _LIBRARY.impl(op, implementation(primitive, name), "CompositeExplicitAutograd")
    torch.library.register_fake(f"mpar_kernels::{op}", reference.abstract, lib=_LIBRARY)
    return getattr(torch.ops.mpar_kernels, op).default


def compiled(source: str, function: F) -> F:
    """`function` compiled by Inductor, which takes ops for pure; unchanged if it calls a primitive that overwrites operands."""
    if any(f"[{name!r}" in source for name, primitive in PRIMITIVES.items() if primitive.mutates):
        return function
    return cast(F, torch.compile(function, dynamic=False))
