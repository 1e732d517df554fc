"""nf4: dequantising a weight of 4096 by 14336, and the weights of eight experts."""

import torch
from torch import Tensor

from mpar import ops
from mpar.kernels import implementation
from tools.kernel_gate._case import Case, Make

SHAPES = {"": (4096, 14336), " of experts": (8, 1536, 4096)}
SCALES = "magnitudes are a byte for 64 weights, and their numbers come from a table"


def _dequantise(make: Make, shape: tuple[int, ...], dtype: torch.dtype) -> object:
    parts = ops.nf4_shapes(shape)

    def part(like: Tensor, kind: torch.dtype) -> Tensor:
        made = make(tuple(like.shape), torch.float32).abs()
        return made.view(torch.int32) if kind == torch.int32 else (60 * made).to(kind)

    operands = [part(x, x.dtype) for x in (parts.codes, parts.absmax, parts.nested, parts.offset)]
    kernel = implementation("dequantise_nf4", "triton")
    return kernel(*operands, dtype=dtype, row_blocks=parts.absmax.shape[-1], starts=[0, 0])


CASES = [
    Case(
        f"dequantise_nf4{name} {str(dtype).removeprefix('torch.')}",
        ("dequantise_nf4",),
        lambda make, shape=shape, dtype=dtype: _dequantise(make, shape, dtype),
        scalar_loads=SCALES,
    )
    for name, shape in SHAPES.items()
    for dtype in (torch.bfloat16, torch.float32)
]
