"""FP8: quantising activations of 4096 and multiplying matrices of 8192, in every form of scales."""

from typing import Any

import torch
from torch import Tensor

from mpar.kernels import implementation
from tools.kernel_gate._case import Case, Make
from tools.kernel_shapes import FP8_MATMUL, QUANTISE

CHIPS = ("sm_90", "sm_100")  # sm_80 has no e4m3
BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
SCALES = "scales are 4 bytes each, columns of them apart"


def _call(primitive: str, *operands: Any, **params: Any) -> object:
    return implementation(primitive, "triton")(*operands, **params)


def _entries(block: str) -> tuple[str, ...]:
    """The entries of the table that are launched to quantise with blocks of this kind."""
    if block in ("1x128", "128x128"):
        return ("quantise_fp8_tiles",)
    return "quantise_fp8_maxima", "quantise_fp8_scales", "quantise_fp8_apply"


def _matmul(make: Make, a_block: str, b_block: str) -> object:
    M, N, K = FP8_MATMUL.dims("MNK")

    def operand(rows: int, block: str) -> tuple[Tensor, Tensor]:
        scales = {"tensor": (1, 1), "row": (rows, 1), "1x128": (rows, K // 128), "128x128": (rows // 128, K // 128)}
        return make((rows, K), BF16).to(FP8), make(scales[block], FP32).abs()

    return _call("fp8_matmul", *operand(M, a_block), *operand(N, b_block), a_block=a_block, b_block=b_block, dtype=BF16)


def _dequantise(make: Make, block: str) -> object:
    M, N = QUANTISE.dims("MN")
    scale = make((M, 1) if block == "row" else (M, N // 128), FP32)
    return _call("dequantise_fp8", make((M, N), BF16).to(FP8), scale, block=block, dtype=BF16)


CASES = [
    *(
        Case(
            f"{primitive} {block} {str(dtype).removeprefix('torch.')}",
            _entries(block),
            lambda make, primitive=primitive, block=block, dtype=dtype: _call(
                primitive, make(QUANTISE.dims("MN"), dtype), block=block
            ),
            archs=CHIPS,
            scalar_loads=SCALES,
        )
        for primitive in ("quantise_fp8", "quantise_fp8_both")
        for block, dtype in (("tensor", BF16), ("row", BF16), ("1x128", BF16), ("128x128", BF16), ("1x128", FP32))
    ),
    *(
        Case(
            f"dequantise_fp8 {block}",
            ("dequantise_fp8",),
            lambda make, block=block: _dequantise(make, block),
            archs=CHIPS,
            scalar_loads=SCALES,
        )
        for block in ("row", "1x128")
    ),
    *(
        Case(
            f"fp8_matmul {a_block} by {b_block}",
            ("fp8_matmul",),
            lambda make, a_block=a_block, b_block=b_block: _matmul(make, a_block, b_block),
            matrix=True,
            tma=True,
            archs=CHIPS,
        )
        for a_block, b_block in (("tensor", "tensor"), ("row", "row"), ("1x128", "128x128"), ("1x128", "1x128"))
    ),
]
