"""SwiGLU as a Llama block calls it."""

import torch

from mpar.kernels import implementation
from tools.kernel_gate._case import Case
from tools.kernel_shapes import GATE

SHAPE = GATE.dims("MF")

CASES = [
    Case(
        "swiglu_fwd bfloat16",
        ("swiglu_fwd",),
        lambda make: implementation("swiglu", "triton")(make(SHAPE, torch.bfloat16), make(SHAPE, torch.bfloat16)),
    ),
    Case(
        "swiglu_bwd bfloat16",
        ("swiglu_bwd",),
        lambda make: implementation("swiglu_bwd", "triton")(*(make(SHAPE, torch.bfloat16) for _ in range(3))),
    ),
]
