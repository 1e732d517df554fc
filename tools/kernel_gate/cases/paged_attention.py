"""Paged attention as steps of inference call it: every head size, a token of each row, a prompt, latents, windows, caps."""

import functools

import torch

from mpar.kernels import implementation
from tools.kernel_gate._case import Case, Make
from tools.kernel_shapes import PAGED, Shape

ONE_NUMBER = "rows, positions, page numbers and log-sum-exps are one number each; every element of parts is loaded by 128 bits"
LATENT_SPILLS = {"sm_100 3.6": 8, "sm_90 3.9": 76, "sm_100 3.9": 76}
"""Sums of 64 heads by 576 features take 144 of the 255 registers of a thread. Matrix instructions of these chips take no fewer
heads, and programs with half of the features each would compute all scores twice. What stays the same in the loop is spilled."""
SPLIT = ("paged_attention_fwd", "paged_attention_merge")


def _attend(
    make: Make,
    shape: Shape,
    dtype: torch.dtype,
    tokens: int | None = None,
    sinks: bool = False,
    latent: bool = False,
    **params: object,
) -> object:
    """Tokens of rows that have pages one after the other; where `tokens` is given, all of them are of the first row."""
    T, N, K, H, R, L, page_size = (shape.sizes[name] for name in ("T", "N", "K", "H", "R", "L", "page_size"))
    count = tokens or T
    q, k = make((1, count, N, H), dtype), make((1, (R * L + 1) * page_size, K, H), dtype)
    v = k if latent else make(k.shape, dtype)
    order = make((1, count), torch.int64) * 0 + torch.arange(count, device=q.device)
    rows, positions = (order * 0, order + (L * page_size - count)) if tokens else (order, order % (L * page_size))
    pages = 1 + make((1, R, L), torch.int64) * 0 + torch.arange(R * L, device=q.device).view(R, L)
    how = {"shard": False, "page_size": page_size, "window": None, "scale": 0.1, "soft_cap": None} | params
    kernel = implementation("paged_attention", "triton")
    return kernel(q, k, v, rows, positions, pages, make((N,), dtype) if sinks else None, **how)


CASES = [
    Case(
        f"paged_attention {name}",
        kernels,
        functools.partial(_attend, shape=PAGED[size], dtype=dtype, **how),
        matrix=dtype != torch.float32,
        scalar_loads=ONE_NUMBER,
        spill_bytes=LATENT_SPILLS if size == "576" else {},
    )
    for name, size, dtype, kernels, how in [
        ("64 window and sinks", "64", torch.bfloat16, SPLIT, {"window": 128, "sinks": True}),
        ("128", "128", torch.bfloat16, SPLIT, {}),
        ("128 prompt", "128", torch.bfloat16, SPLIT[:1], {"tokens": 1024}),
        ("256 window and soft cap", "256", torch.bfloat16, SPLIT, {"window": 4096, "soft_cap": 50.0}),
        ("576 latents", "576", torch.bfloat16, SPLIT, {"latent": True}),
        ("64 float32, a shard", "64", torch.float32, SPLIT, {"shard": True}),
        ("128 float32", "128", torch.float32, SPLIT, {}),
        ("256 float32", "256", torch.float32, SPLIT, {}),
    ]
]
