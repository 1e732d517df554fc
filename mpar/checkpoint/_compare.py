"""Norms of the tensors of a checkpoint, and how two checkpoints differ, read in parts of a few MiB."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mpar.checkpoint._reader import Reader
from mpar.checkpoint._slabs import bytes_of
from mpar.checkpoint._state import Json

__all__ = ["TensorDifference", "extras_differences", "norm", "tensor_difference"]


@dataclass(frozen=True)
class TensorDifference:
    """How a tensor `b` differs from `a` of the same shape and dtype: the largest absolute difference, and |b - a| / |a| in the
    Euclidean norm. Both are nan if values are."""

    max_abs: float
    relative_norm: float


def norm(source: Reader, name: str, on_bytes: Callable[[int], None] = lambda _: None) -> float:
    """The Euclidean norm of the tensor `name`, in float64; of booleans as 0 and 1. on_bytes: is told how many bytes were read."""
    total = 0.0
    for box in source.boxes(name):
        values = source.read(name, box)
        total += float(_double(values).square().sum())
        on_bytes(values.nbytes)
    return math.sqrt(total)


def tensor_difference(
    a: Reader, b: Reader, name: str, on_bytes: Callable[[int], None] = lambda _: None
) -> TensorDifference | None:
    """How the tensor `name`, of the same shape and dtype in both, differs; None if all bits are equal.

    `on_bytes` is told how many bytes of both were read.
    """
    equal, largest, difference, reference = True, 0.0, 0.0, 0.0
    for box in a.boxes(name):
        one, other = a.read(name, box), b.read(name, box)
        on_bytes(2 * one.nbytes)
        old = _double(one)
        reference += float(old.square().sum())
        if bytes_of(one) != bytes_of(other):
            equal, change = False, _double(other) - old
            largest = float(torch.maximum(torch.tensor(largest, dtype=torch.float64), change.abs().max()))
            difference += float(change.square().sum())
    if equal:
        return None
    return TensorDifference(largest, math.sqrt(difference / reference) if reference else math.inf)


def extras_differences(a: Json, b: Json, where: str = "") -> list[tuple[str, Json, Json]]:
    """(dotted key, value in `a`, value in `b`) for everything that differs; None stands for a key that one of them lacks."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        keys = [*a, *(key for key in b if key not in a)]
        return [line for key in keys for line in extras_differences(a.get(key), b.get(key), f"{where}.{key}" if where else key)]
    return [] if a == b and type(a) is type(b) else [(where, a, b)]


def _double(values: Tensor) -> Tensor:
    return (values.float() if values.dtype.itemsize == 1 and values.is_floating_point() else values).double()
