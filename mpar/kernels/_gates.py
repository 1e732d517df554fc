"""Gates: what launches of SwiGLU and GEGLU share. Operands may be halves of one packed projection, with any stride of rows."""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from mpar.kernels._launch import Kernel, launch, tuned
from mpar.kernels._rows import as_rows

__all__ = ["launch_gate"]


def launch_gate(
    kernel: Kernel, name: str, operands: Sequence[Tensor], num_results: int, **constants: object
) -> tuple[Tensor, ...]:
    """Launch an element-wise `kernel` by the table's entry `name`. Results are contiguous, with operand 0's shape and dtype.

    The kernel gets pointers to operands and results, the number of columns, blocks per row, and the row stride of each operand.
    """
    first = operands[0]
    results = tuple(torch.empty(first.shape, dtype=first.dtype, device=first.device) for _ in range(num_results))
    entry = tuned(name, first)
    if not first.numel():
        return results
    flat = all(x.is_contiguous() for x in operands)  # then all is one long row, with one incomplete block at its end
    matrices = [x.view(1, -1) if flat else as_rows(x) for x in operands]
    num_rows, size = matrices[0].shape
    blocks = triton.cdiv(size, entry.blocks["BLOCK"])
    strides = [x.stride(0) for x in matrices]
    launch(kernel, (num_rows * blocks,), *matrices, *results, size, blocks, *strides, on=first, tuning=entry, **constants)
    return results
