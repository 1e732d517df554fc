"""Few tokens: paged attention of a step's new tokens on a CPU, which read keys and values where they lie (mpar/cpp)."""

import ctypes
import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from mpar.cpp import cpp_function, cpp_structure

__all__ = ["few_tokens"]

_MOST_TOKENS = 16
"""Of more tokens many are of one prompt. Then products of matrices are faster."""
_SIZES = range(16, 1025, 16)
_TYPES: Mapping[torch.dtype, str] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_NUMBERS = ("tokens", "q_distance", "kv_heads", "groups", "size", "places", "row_pages", "page_size", "window")
_Call = cpp_structure("_Call", _NUMBERS, ["scale", "soft_cap"])
"""`Call` of paged_attention.cpp."""


def few_tokens(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, positions: Tensor, pages: Tensor, sinks: Tensor | None,
    *, page_size: int, window: int | None, scale: float, soft_cap: float | None,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """The results of paged attention; None for what C++ does not support here. Pages that are not in the pools are left out."""
    run = cpp_function("paged_attention", f"paged_attention_{_TYPES[q.dtype]}", 10) if _supports(q, k, v) else None
    if run is None:
        return None
    (groups, tokens, heads, size), (_, places, kv_heads, _) = q.shape, k.shape
    q = q if q.stride()[2:] == (size, 1) else q.contiguous()
    rows, positions, pages = rows.contiguous(), positions.contiguous(), pages.contiguous()
    sinks = None if sinks is None else sinks.float().contiguous()
    out, lse = torch.empty(q.shape, dtype=q.dtype), torch.empty(q.shape[:3])
    sizes = tokens, q.stride(1), kv_heads, heads // kv_heads, size, places, pages.shape[2], page_size, window or 0
    call = ctypes.addressof(_call(*sizes, scale, soft_cap or 0.0))
    for group in range(groups):
        given = [x.data_ptr() + group * x.stride(0) * x.element_size() for x in (q, k, v, rows, positions, pages)]
        run(call, *given, None if sinks is None else sinks.data_ptr(), out[group].data_ptr(), lse[group].data_ptr())
    return out, lse


@functools.lru_cache(maxsize=256)
def _call(*members: float) -> ctypes.Structure:
    """Sizes and parameters, which are the same in all layers of a step."""
    return _Call(*members)


def _supports(q: Tensor, k: Tensor, v: Tensor) -> bool:
    fits = q.shape[1] <= _MOST_TOKENS and q.shape[3] in _SIZES and q.numel() > 0
    return fits and q.dtype in _TYPES and q.device.type == "cpu" and k.is_contiguous() and v.is_contiguous()
