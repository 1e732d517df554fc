"""Paged attention in C++: of a few tokens on a CPU, where torch would copy keys out of their pages and call a dozen functions."""

import ctypes
import functools
from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor

from mpar.kernels._choose import implementation
from mpar.kernels._cpp import cpp_library

__all__ = ["paged_attention"]

_MOST_TOKENS = 16
"""Of more tokens many are of one prompt. Then torch is faster, which multiplies matrices."""
_SIZES = range(16, 1025, 16)
"""Sizes of heads that are whole vectors."""
_TYPES: Mapping[torch.dtype, str] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class _Call(ctypes.Structure):
    """`Call` of paged_attention.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("tokens", "q_distance", "kv_heads", "groups", "size")),
        *((name, ctypes.c_int64) for name in ("places", "row_pages", "page_size", "window")),
        *((name, ctypes.c_float) for name in ("scale", "soft_cap")),
    ]


def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, positions: Tensor, pages: Tensor, sinks: Tensor | None,
    *, shard: bool, page_size: int, window: int | None, scale: float, soft_cap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What the primitive's own implementation gives, up to rounding."""
    if not _supports(q, k, v):
        how = {"shard": shard, "page_size": page_size, "window": window, "scale": scale, "soft_cap": soft_cap}
        return implementation("paged_attention")(q, k, v, rows, positions, pages, sinks, **how)  # type: ignore[return-value]
    (groups, tokens, heads, size), (_, places, kv_heads, _) = q.shape, k.shape
    q = q if q.stride()[2:] == (size, 1) else q.contiguous()
    rows, positions, pages = (x.contiguous() for x in (rows, positions, pages))
    sinks = None if sinks is None else sinks.float().contiguous()
    out = torch.empty(q.shape, dtype=q.dtype)
    lse = torch.empty(q.shape[:3])
    run = _function(_TYPES[q.dtype])
    sizes = tokens, q.stride(1), kv_heads, heads // kv_heads, size, places, pages.shape[2], page_size, window or 0
    call = _call(*sizes, scale, soft_cap or 0.0)
    sink = None if sinks is None else sinks.data_ptr()
    for group in range(groups):
        given = [x.data_ptr() + group * x.stride(0) * x.element_size() for x in (q, k, v, rows, positions, pages)]
        run(call, *given, sink, out[group].data_ptr(), lse[group].data_ptr())
    return out, lse


@functools.lru_cache(maxsize=256)
def _call(*fields: float) -> object:
    """A pointer to sizes and parameters. All layers of a step have the same ones."""
    return ctypes.byref(_Call(*fields))


@functools.cache
def _function(dtype: str) -> Callable[..., None]:
    run = getattr(cpp_library("paged_attention"), f"paged_attention_{dtype}")
    run.argtypes, run.restype = [ctypes.c_void_p] * 10, None
    return cast(Callable[..., None], run)


def _supports(q: Tensor, k: Tensor, v: Tensor) -> bool:
    fits = q.shape[1] <= _MOST_TOKENS and q.shape[3] in _SIZES
    return fits and q.dtype in _TYPES and q.device.type == "cpu" and k.is_contiguous() and v.is_contiguous()
