"""Comparisons for tests: one table maps a dtype to the relative error that its arithmetic can promise."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

__all__ = ["TOLERANCES", "assert_close", "relative_error", "vjp"]

TOLERANCES = {
    torch.float64: 1e-11,  # a few thousand roundings of 1e-16, none of them amplified
    torch.float32: 1e-5,  # the same for 6e-8, with statistics over up to 1e4 elements
    torch.bfloat16: 2e-2,  # 8 bits of mantissa: 4e-3 per rounding, a handful in a row
    torch.float16: 3e-3,  # 11 bits of mantissa
}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """`|actual - expected| / |expected|` in the Euclidean norm, in float64; 0 if both are zero."""
    actual, expected = actual.detach().double(), expected.detach().double()
    difference, size = float(torch.linalg.vector_norm(actual - expected)), float(torch.linalg.vector_norm(expected))
    return difference / size if size else (0.0 if difference == 0 else float("inf"))


def assert_close(actual: Tensor, expected: Tensor, *, name: str = "value", rtol: float | None = None) -> None:
    """Raise AssertionError unless shapes are equal and the relative error is at most `rtol` (default: by `actual`'s dtype)."""
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    infinite = torch.isinf(expected)
    assert torch.equal(torch.isinf(actual), infinite), f"{name}: infinities are not where they should be"
    actual, expected = actual.masked_fill(infinite, 0.0), expected.masked_fill(infinite, 0.0)
    bound = TOLERANCES[actual.dtype] if rtol is None else rtol
    error = relative_error(actual, expected)
    assert error <= bound, f"{name}: relative error {error:.3e} exceeds {bound:.1e}"  # a NaN fails too


Outputs = TypeVar("Outputs")


def vjp(fn: Callable[..., Outputs], *primals: Tensor) -> tuple[Outputs, Callable[..., tuple[Tensor, ...]]]:
    """`(fn(*primals), pull_back)` by torch.func; `pull_back` takes the cotangents of the outputs."""
    outputs, pull_back, *_ = torch.func.vjp(fn, *primals)
    return outputs, pull_back
