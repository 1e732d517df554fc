"""Eager: ops that are called outside a program, on tensors of a GPU, take the kernels that a program would take."""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mpar.kernels._catalogue import CATALOGUE
from mpar.kernels._choose import Kernels, choose, implementation, kernels_for
from mpar.ops import PRIMITIVES

__all__ = ["eager", "install"]


def eager(primitive: str) -> Callable[..., object]:
    """A function that chooses an implementation of `primitive` for its operands, as `kernels=auto` does, and calls it."""

    def call(*operands: object, **params: object) -> object:
        name, _ = choose(_kernels(_device(operands)), primitive, operands, params)
        return implementation(primitive, name)(*operands, **params)

    return call


@functools.cache
def _kernels(device: torch.device) -> Kernels:
    return kernels_for("auto", device)


def _device(operands: Sequence[object]) -> torch.device:
    """The device of the first tensor among the operands."""
    for operand in operands:
        if isinstance(operand, Tensor):
            return operand.device
        if isinstance(operand, (list, tuple)) and operand:
            return _device(operand)
    raise AssertionError("a primitive without a tensor was dispatched by device")


def install() -> None:
    """Let every primitive of the catalogue choose an implementation when it is called with CUDA tensors outside a program."""
    for name in CATALOGUE:
        PRIMITIVES[name].def_impl_on("CUDA", eager(name))
