"""GEGLU as a Gemma block calls it, and gates whose operands are halves of one packed projection."""

import torch

from mpar.kernels import implementation
from tools.kernel_gate._case import Case, Make
from tools.kernel_shapes import GATE

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _operands(make: Make, dtype: torch.dtype, packed: bool) -> list[torch.Tensor]:
    M, F = GATE.dims("MF")
    dy = make((M, F), dtype)
    if not packed:
        return [make((M, F), dtype), make((M, F), dtype), dy]
    both = make((M, 2 * F), dtype)
    return [both[:, :F], both[:, F:], dy]


def _geglu(make: Make, dtype: torch.dtype, approximate: str, packed: bool) -> None:
    implementation("geglu", "triton")(*_operands(make, dtype, packed)[:2], approximate=approximate)


def _geglu_bwd(make: Make, dtype: torch.dtype, approximate: str, packed: bool) -> None:
    implementation("geglu_bwd", "triton")(*_operands(make, dtype, packed), approximate=approximate)


def _cases(dtype: torch.dtype, approximate: str, packed: bool = False) -> list[Case]:
    name = f"{approximate}{' packed' if packed else ''} {str(dtype).removeprefix('torch.')}"
    return [
        Case(f"geglu_fwd {name}", ("geglu_fwd",), lambda make: _geglu(make, dtype, approximate, packed)),
        Case(f"geglu_bwd {name}", ("geglu_bwd",), lambda make: _geglu_bwd(make, dtype, approximate, packed)),
    ]


CASES = [
    *(case for dtype in DTYPES for case in _cases(dtype, "tanh")),
    *_cases(torch.bfloat16, "none"),
    *_cases(torch.bfloat16, "tanh", packed=True),
    Case(
        "swiglu_fwd packed bfloat16",
        ("swiglu_fwd",),
        lambda make: implementation("swiglu", "triton")(*_operands(make, torch.bfloat16, True)[:2]),
    ),
    Case(
        "swiglu_bwd packed bfloat16",
        ("swiglu_bwd",),
        lambda make: implementation("swiglu_bwd", "triton")(*_operands(make, torch.bfloat16, True)),
    ),
]
