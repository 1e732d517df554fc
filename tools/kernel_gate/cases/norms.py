"""Norms of a residual stream of 16384 tokens, and of heads: every width class of the table."""

import torch

from mpar.kernels import implementation
from tools.kernel_gate._case import Case, Make
from tools.kernel_shapes import NORMS

NARROW = (
    "rows of a few hundred columns are held by few threads each; weights and their gradients are read and written in narrow words"
)
EPS = 1e-6


def _add_rms_norm(make: Make, width: int, dtype: torch.dtype) -> None:
    x, residual = make(NORMS[width].dims("MN"), dtype), make(NORMS[width].dims("MN"), dtype)
    implementation("add_rms_norm", "triton")(x, residual, make((width,), dtype), eps=EPS)


def _add_rms_norm_bwd(make: Make, width: int, dtype: torch.dtype) -> None:
    total, dy, dtotal = (make(NORMS[width].dims("MN"), dtype) for _ in range(3))
    implementation("add_rms_norm_bwd", "triton")(total, make((width,), dtype), dy, dtotal, eps=EPS)


def _add_layer_norm(make: Make, width: int, dtype: torch.dtype) -> None:
    x, residual = make(NORMS[width].dims("MN"), dtype), make(NORMS[width].dims("MN"), dtype)
    weight, bias = make((width,), dtype), make((width,), dtype)
    implementation("add_layer_norm", "triton")(x, residual, weight, bias, eps=EPS)


def _add_layer_norm_bwd(make: Make, width: int, dtype: torch.dtype) -> None:
    total, dy, dtotal = (make(NORMS[width].dims("MN"), dtype) for _ in range(3))
    weight, bias = make((width,), dtype), make((width,), dtype)
    implementation("add_layer_norm_bwd", "triton")(total, weight, bias, dy, dtotal, eps=EPS)


def _cases(width: int, dtype: torch.dtype) -> list[Case]:
    wide = "_wide" if width > 8192 else ""
    name, scalar = f"{width} {str(dtype).removeprefix('torch.')}", NARROW if width <= 512 else ""
    run = {
        "rms_norm_fwd": (("rms_norm_fwd",), _add_rms_norm),
        "rms_norm_bwd": ((f"rms_norm_bwd{wide}", "add_rows"), _add_rms_norm_bwd),
        "layer_norm_fwd": (("layer_norm_fwd",), _add_layer_norm),
        "layer_norm_bwd": ((f"layer_norm_bwd{wide}", "add_rows"), _add_layer_norm_bwd),
    }
    return [
        Case(
            f"{kernel} {name}",
            kernels,
            lambda make, call=call: call(make, width, dtype),
            scalar_loads=scalar or ("sums of columns, 32 to a program" if kernel.endswith("bwd") else ""),
        )
        for kernel, (kernels, call) in run.items()
    ]


CASES = [
    *(case for width in NORMS for case in _cases(width, torch.bfloat16)),
    *_cases(4096, torch.float16),
    *_cases(4096, torch.float32),
    Case(
        "rms_norm of heads bfloat16",
        ("rms_norm_fwd",),
        lambda make: implementation("rms_norm", "triton")(
            make((2, 8192, 32, 128), torch.bfloat16), make((128,), torch.bfloat16), eps=EPS
        ),
        scalar_loads=NARROW,
    ),
]
