"""Attention as models call it: every entry of the table, and all that changes code: documents, orders, windows, caps, sinks."""

import torch
from torch import Tensor

from mpar import kernels
from mpar.kernels import implementation
from tools.kernel_gate._case import Case, Make
from tools.kernel_shapes import ATTENTION, MERGE, Shape

PLAIN = {"causal": True, "window": None, "scale": 0.1, "soft_cap": None}
ROWS_OF_A_HEAD = "lse is (B, S, N), so that its rows of one head are N apart; every element of out and dout is loaded by 128 bits"

ONE_LSE = "a row has one number of each lse; every element of out and dout is loaded by 128 bits"


def _masks(make: Make, shape: Shape, documents: bool, orders: bool, sinks: bool) -> tuple[Tensor | None, ...]:
    """The operands after q, k and v: orders and document ids of the right shapes and in the right order, and sinks."""
    B, S, N = shape.dims("BSN")
    ids = make((B, S), torch.float32).abs().mul(8).to(torch.int32).sort(1).values if documents else None
    order = make((S,), torch.float32).argsort().to(torch.int32) if orders else None
    return order, order, ids, ids, make((N,), torch.bfloat16) if sinks else None


def _operands(make: Make, shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v."""
    B, S, N, K, H = shape.dims("BSNKH")
    return make((B, S, N, H), dtype), make((B, S, K, H), dtype), make((B, S, K, shape.sizes.get("V", H)), dtype)


def _forward(make: Make, shape: Shape, dtype: torch.dtype, *masks: bool, **params: object) -> object:
    q, k, v = _operands(make, shape, dtype)
    return implementation("attention", "triton")(q, k, v, *_masks(make, shape, *masks), **PLAIN | params)


def _backward(make: Make, shape: Shape, dtype: torch.dtype, *masks: bool, **params: object) -> object:
    q, k, v = _operands(make, shape, dtype)
    operands, params = (q, k, v, *_masks(make, shape, *masks)), PLAIN | params
    B, S, N = shape.dims("BSN")
    value = v.shape[3]
    if q.is_meta:
        out, lse = make((B, S, N, value), dtype), make((B, S, N), torch.float32)
    else:  # random results would make gradients infinite in float16; this call itself is neither checked nor timed
        out, lse = kernels.implementation("attention", "triton")(*operands, **params)
    dout, dlse = make((B, S, N, value), dtype), make((B, S, N), torch.float32)
    return implementation("attention_bwd", "triton")(*operands, out, lse, dout, dlse, **params)


def _pair(
    size: str, what: str, dtype: torch.dtype = torch.bfloat16, documents: bool = False, orders: bool = False, sinks: bool = False,
    **params: object,
) -> list[Case]:  # fmt: skip
    """The cases of the forward and of the backward."""
    ranges = ("attention_ranges",) if documents or orders else ()
    arguments = ATTENTION[size], dtype, documents, orders, sinks
    return [
        Case(
            f"attention {size} {what}",
            ("attention_fwd", *ranges),
            lambda make: _forward(make, *arguments, **params),
            matrix=True,
            tma=True,
            scalar_loads="orders and documents are one number for each row" if ranges else "",
        ),
        Case(
            f"attention_bwd {size} {what}",
            ("attention_delta", "attention_dkdv", "attention_dq", *ranges),
            lambda make: _backward(make, *arguments, **params),
            matrix=True,
            tma=True,
            scalar_loads=ROWS_OF_A_HEAD,
        ),
    ]


def _merge(make: Make) -> object:
    shape = (1, *MERGE.dims("SNH"))
    parts = make(shape, torch.bfloat16), make(shape[:3], torch.float32)
    return implementation("merge_attention", "triton")(*parts, *parts)


def _merge_bwd(make: Make) -> object:
    shape = (1, *MERGE.dims("SNH"))
    parts = make(shape, torch.bfloat16), make(shape[:3], torch.float32)
    return implementation("merge_attention_bwd", "triton")(*parts, *parts, *parts)


CASES = [
    *(case for size in ATTENTION for case in _pair(size, "bfloat16")),
    *_pair("128", "float16", torch.float16),
    *(case for size in ATTENTION for case in _pair(size, "documents", documents=True)),
    *_pair("128", "documents, window", documents=True, window=128),
    *_pair("128", "orders", orders=True),
    *_pair("64", "window and sinks", sinks=True, window=128),
    *_pair("256", "window and soft cap", window=4096, soft_cap=50.0),
    Case("merge_attention 128 bfloat16", ("merge_attention_fwd",), _merge, scalar_loads=ONE_LSE),
    Case("merge_attention_bwd 128 bfloat16", ("merge_attention_bwd",), _merge_bwd, scalar_loads=ONE_LSE),
]
