"""Attention as models call it: every entry of the table, and what changes the code: documents, orders, windows, caps, sinks."""

import torch

from bench.kernels._case import Case, Make
from mpar.kernels import implementation

HEADS = {"64": (64, 64), "128": (128, 128), "256": (256, 256), "192,128": (192, 128)}
PLAIN = {"causal": True, "window": None, "scale": 0.1, "soft_cap": None}
B, S, N, K = 2, 8192, 32, 8
FORWARD, BACKWARD = ("attention_fwd",), ("attention_delta", "attention_dkdv", "attention_dq")


def _ids(make: Make, shape: tuple[int, ...]) -> torch.Tensor:
    return make(shape, torch.float32).abs().mul(3).to(torch.int32)


def _masks(make: Make, documents: bool, orders: bool, sinks: bool) -> tuple[torch.Tensor | None, ...]:
    """Operands after q, k and v."""
    ids = _ids(make, (B, S)).sort(1).values if documents else None
    order = torch.arange(S, dtype=torch.int32, device=make((1,), torch.float32).device) if orders else None
    return order, order, ids, ids, make((N,), torch.bfloat16) if sinks else None


def _forward(make: Make, sizes: tuple[int, int], dtype: torch.dtype, *masks: bool, **params: object) -> object:
    size, size_v = sizes
    q, k, v = make((B, S, N, size), dtype), make((B, S, K, size), dtype), make((B, S, K, size_v), dtype)
    return implementation("attention", "triton")(q, k, v, *_masks(make, *masks), **PLAIN | params)


def _backward(make: Make, sizes: tuple[int, int], dtype: torch.dtype, *masks: bool, **params: object) -> object:
    size, size_v = sizes
    q, k, v = make((B, S, N, size), dtype), make((B, S, K, size), dtype), make((B, S, K, size_v), dtype)
    others, params = _masks(make, *masks), PLAIN | params
    out, lse = implementation("attention", "triton")(q, k, v, *others, **params)
    dout, dlse = make((B, S, N, size_v), dtype), make((B, S, N), torch.float32)
    return implementation("attention_bwd", "triton")(q, k, v, *others, out, lse, dout, dlse, **params)


def _case(name: str, kernels: tuple[str, ...], run: object, *arguments: object, tma: bool = True, **params: object) -> Case:
    masks = arguments if len(arguments) > 2 else (*arguments, False, False, False)
    return Case(name, kernels, lambda make: run(make, *masks, **params), matrix=True, tma=tma)


def _pair(what: str, size: str, dtype: torch.dtype, *masks: bool, **params: object) -> list[Case]:
    ranges = ("attention_ranges",) if any(masks[:2]) else ()
    return [
        _case(f"attention_fwd {size} {what}", FORWARD + ranges, _forward, HEADS[size], dtype, *masks, **params),
        _case(f"attention_bwd {size} {what}", FORWARD + BACKWARD + ranges, _backward, HEADS[size], dtype, *masks, **params),
    ]


CASES = [case for size in HEADS for case in _pair("bfloat16", size, torch.bfloat16)]
