"""Which calls the kernels of FP8 support, and in words why not the others. This module needs no Triton."""

import torch
from torch import Tensor

__all__ = ["fp8_matmul_supports", "quantise_both_workspace", "quantise_supports", "quantise_workspace"]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
PAIRS = (("tensor", "tensor"), ("tensor", "row"), ("row", "tensor"), ("row", "row"), ("1x128", "128x128"), ("1x128", "1x128"))


def _chip(arch: str) -> str | None:
    return "sm_80 has no e4m3; it is there from sm_90 on" if arch == "sm_80" else None


def quantise_supports(arch: str, x: Tensor, *others: Tensor, block: str, dtype: torch.dtype = torch.float32) -> str | None:
    """Why the kernels cannot quantise `x`, or dequantise it to `dtype` if it is in FP8; None if they can."""
    wide = x.dtype if x.dtype.itemsize > 1 else dtype
    return _chip(arch) or (None if wide in FLOATS else f"{wide}: kernels compute in float32")


def fp8_matmul_supports(arch: str, a: Tensor, *others: Tensor, a_block: str, b_block: str, dtype: torch.dtype) -> str | None:
    """Why the kernel of `fp8_matmul` cannot carry out this call; None if it can."""
    if (a_block, b_block) not in PAIRS:
        return f"blocks {a_block} by {b_block}: kernels have {', '.join(f'{x} by {y}' for x, y in PAIRS)}"
    if dtype not in FLOATS:
        return f"a result of {dtype}: kernels sum in float32"
    return _chip(arch) or (f"rows of {a.shape[1]} bytes: descriptors load multiples of 16" if a.shape[1] % 16 else None)


def quantise_workspace(x: Tensor, *, block: str) -> int:
    """Bytes of the largest magnitudes of every 512 elements of a row, needed where a scale is that of a row or of the tensor."""
    return 4 * x.shape[0] * -(-x.shape[1] // 512) if block in ("row", "tensor") else 0


def quantise_both_workspace(x: Tensor, *, block: str) -> int:
    """The same, and where scales are those of rows, the largest magnitudes of every 16 elements of a column."""
    return quantise_workspace(x, block=block) + (4 * x.shape[1] * -(-x.shape[0] // 16) if block == "row" else 0)
