"""RoPE of 32 heads of queries and 8 of keys, as a Llama block calls it, and other head sizes and layouts."""

import torch

from mpar.kernels import implementation
from tools.kernel_gate._case import Case, Make
from tools.kernel_shapes import ROPE

B, S, N, K = ROPE.dims("BSNK")
WIDE = "the table of a token is narrower than the block of threads; it is read once for all heads"


def _many(make: Make, size: int, turned: int, dtype: torch.dtype, interleaved: bool) -> None:
    q, k = make((B, S, N, size), dtype), make((B, S, K, size), dtype)
    cos, sin = (make((1, S, turned // 2), torch.float32) for _ in range(2))
    implementation("rope_many", "triton")([q, k], cos, sin, interleaved=interleaved)


def _one(make: Make, size: int, turned: int, dtype: torch.dtype) -> None:
    cos, sin = (make((1, S, turned // 2), torch.float32) for _ in range(2))
    implementation("rope", "triton")(make((B, S, N, size), dtype), cos, sin, interleaved=False)


def _case(size: int, turned: int, dtype: torch.dtype = torch.bfloat16, interleaved: bool = False) -> Case:
    layout = " interleaved" if interleaved else ""
    return Case(
        f"rope_many {turned} of {size}{layout} {str(dtype).removeprefix('torch.')}",
        ("rope",),
        lambda make: _many(make, size, turned, dtype, interleaved),
        scalar_loads=WIDE if turned > 128 else "",
    )


CASES = [
    _case(128, 128),
    _case(128, 128, interleaved=True),
    _case(128, 128, torch.float16),
    _case(128, 128, torch.float32),
    _case(64, 64),
    _case(128, 32),
    _case(256, 256),
    _case(512, 512),
    Case("rope 64 of 192 bfloat16", ("rope",), lambda make: _one(make, 192, 64, torch.bfloat16)),
    Case("rope 128 of 128 bfloat16", ("rope",), lambda make: _one(make, 128, 128, torch.bfloat16)),
]
