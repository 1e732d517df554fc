"""Which calls the kernel of nf4 supports. This module needs no Triton."""

import torch
from torch import Tensor

__all__ = ["dequantise_nf4_supports"]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def dequantise_nf4_supports(
    arch: str, codes: Tensor, absmax: Tensor, nested: Tensor, offset: Tensor, *, dtype: torch.dtype, **_: object
) -> str | None:
    """Why the kernel cannot carry out this call; None if it can."""
    if dtype not in FLOATS:
        return f"{dtype}: kernels compute in float32"
    experts = absmax.shape[0] if absmax.ndim == 3 else 1
    return f"{experts} experts: the grid of a kernel has at most 65535 along its last dim" if experts > 65535 else None
