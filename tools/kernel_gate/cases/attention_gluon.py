"""Attention forward in Gluon: both head sizes, both dtypes, causal and full."""

import functools

import torch

from mpar.kernels import implementation
from tools.kernel_gate._case import Case, Make
from tools.kernel_shapes import ATTENTION


def _forward(make: Make, size: str, dtype: torch.dtype, causal: bool) -> object:
    B, S, N, K, H = ATTENTION[size].dims("BSNKH")
    q, k, v = make((B, S, N, H), dtype), make((B, S, K, H), dtype), make((B, S, K, H), dtype)
    masks = (None,) * 5
    return implementation("attention", "gluon")(q, k, v, *masks, causal=causal, window=None, scale=0.1, soft_cap=None)


CASES = [
    Case(
        f"attention gluon {size} {'causal' if causal else 'full'} {str(dtype).removeprefix('torch.')}",
        ("attention_fwd_gluon",),
        functools.partial(_forward, size=size, dtype=dtype, causal=causal),
        matrix=True,
        tma=True,
        archs=("sm_90",),
    )
    for size, dtype, causal in [
        ("64", torch.bfloat16, True),
        ("128", torch.bfloat16, True),
        ("128", torch.bfloat16, False),
        ("128", torch.float16, True),
    ]
]
