"""Calls of kernels that are checked as they are made: against the primitive's reference in float64, and against themselves."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpar import testing
from mpar.kernels import implementation

__all__ = ["checked", "make_on"]

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FLIPPED = 2e-3
"""Tolerance for FP8: a quotient in the middle between two numbers may now and then round to either, which differ by 1/8."""
LOGITS = ("linear_cross_entropy", "linear_cross_entropy_stats", "linear_cross_entropy_grad")
"""Primitives whose logits are rounded to the dtype of x and the head, which shows in results per token, although in float32."""
ATTENTION = {
    "attention": ("q", "k", "v", "_", "_", "b", "b", "n"),
    "attention_bwd": ("q", "k", "v", "_", "_", "b", "b", "n", "q", "q", "q", "q"),
}
"""How the operands are cut to the first sequence and the first kv head: scores of all heads in float64 would not fit."""


def make_on(device: str) -> Callable[..., Tensor]:
    """`make(shape, dtype)` as cases need it: random normal numbers, or for integer dtypes whole numbers from 0 to 99."""
    generator = torch.Generator(device).manual_seed(20260101)

    def make(shape: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> Tensor:
        if not dtype.is_floating_point:
            return torch.randint(100, tuple(shape), dtype=dtype, device=device, generator=generator)
        wide = dtype if dtype.itemsize > 1 else torch.float32
        return torch.empty(tuple(shape), dtype=wide, device=device).normal_(generator=generator).to(dtype)

    return make


def checked(primitive: str, name: str = "triton") -> Callable[..., Any]:
    """The implementation with checks: it raises AssertionError if results differ from float64, or a second run from the first."""
    kernel = implementation(primitive, name)

    def call(*operands: Any, **params: Any) -> Any:
        results, again = (_listed(kernel(*_copies(operands), **params)) for _ in range(2))
        for index, (first, second) in enumerate(zip(results, again, strict=True)):
            assert _same_bits(first, second), f"{primitive}: result {index} has other bits when it is computed again"
        del again
        small, select = _first_head(primitive, operands)
        expected = _listed(implementation(primitive)(*_wide(small), **params))
        rtol = testing.TOLERANCES[operands[0].dtype] if primitive in LOGITS else None
        for index, (actual, reference) in enumerate(zip(results, expected, strict=True)):
            _compare(f"{primitive}: result {index}", select(index, actual), reference, rtol)
        return kernel(*operands, **params)

    return call


def _compare(name: str, actual: Tensor | None, expected: Tensor, rtol: float | None) -> None:
    if actual is None:
        return
    if not actual.dtype.is_floating_point:
        assert torch.equal(actual, expected.to(actual.dtype)), f"{name}: integers differ"
    elif actual.dtype in FP8:
        testing.assert_close(actual.float(), expected.float(), name=name, rtol=FLIPPED)
    else:
        testing.assert_close(actual, expected.double(), name=name, rtol=rtol)


def _first_head(primitive: str, operands: Sequence[Any]) -> tuple[Sequence[Any], Callable[[int, Tensor], Tensor | None]]:
    """The operands that the float64 reference gets, and a function that cuts the part that it computes out of a result."""
    if primitive not in ATTENTION:
        return operands, lambda index, x: x
    groups = operands[0].shape[2] // operands[1].shape[2]
    cuts: dict[str, Callable[[Tensor], Tensor]] = {
        "q": lambda x: x[:1, :, :groups],
        "k": lambda x: x[:1, :, :1],
        "b": lambda x: x[:1],
        "n": lambda x: x[:groups],
        "_": lambda x: x,
    }
    cuts["v"] = cuts["k"]
    small = [None if x is None else cuts[cut](x) for cut, x in zip(ATTENTION[primitive], operands, strict=True)]
    results = ("q", "q") if primitive == "attention" else ("q", "k", "v", "")  # a sink's gradient sums over sequences
    return small, lambda index, x: cuts[results[index]](x) if results[index] else None


def _copies(operands: Sequence[Any]) -> list[Any]:
    """Copies with the same strides, because kernels may overwrite their operands."""
    return [_each(operand, lambda x: x.clone()) for operand in operands]


def _wide(operands: Sequence[Any]) -> list[Any]:
    """The operands in float64. If some of them are quantised, as they are: numbers in FP8 and their scales are exact."""
    tensors = [x for operand in operands for x in _listed(operand)]
    if any(x is not None and x.dtype in FP8 for x in tensors):
        return list(operands)
    return [_each(operand, lambda x: x.double() if x.is_floating_point() else x) for operand in operands]


def _each(operand: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(operand, (list, tuple)):
        return [_each(x, fn) for x in operand]
    return None if operand is None else fn(operand)


def _listed(results: Any) -> list[Any]:
    if isinstance(results, (list, tuple)):
        return [x for result in results for x in _listed(result)]
    return [results]


def _same_bits(first: Tensor, second: Tensor) -> bool:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    kind = kinds[first.dtype.itemsize]
    return torch.equal(first.contiguous().view(kind), second.contiguous().view(kind))
