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
_NUMBERS = (
    *("tokens", "q_distance", "kv_heads", "groups", "size", "places"),
    *("rows", "row_pages", "page_size", "window", "shard"),
)
_Call = cpp_structure("_Call", _NUMBERS, ["scale", "soft_cap"])
"""`Call` of paged_attention.cpp."""


def few_tokens(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, positions: Tensor, pages: Tensor, sinks: Tensor | None,
    *, shard: bool, page_size: int, window: int | None, scale: float, soft_cap: float | None,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """The results of paged attention; None for what C++ does not support here. shard: pages that are not in the pools are left
    out. Raises IndexError for a token whose positions are in no page."""
    run = cpp_function("paged_attention", f"paged_attention_{_TYPES[q.dtype]}", 11) if _supports(q, k, v) else None
    if run is None:
        return None
    (groups, tokens, heads, size), (_, places, kv_heads, _) = q.shape, k.shape
    q = q if q.stride()[2:] == (size, 1) else q.contiguous()
    rows, positions, pages = rows.contiguous(), positions.contiguous(), pages.contiguous()
    sinks = None if sinks is None else sinks.float().contiguous()
    out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)
    sizes = tokens, q.stride(1), kv_heads, heads // kv_heads, size, places, *pages.shape[1:], page_size, window or 0, shard
    call, wrong = _call(*sizes, scale, soft_cap or 0.0), ctypes.c_int64(-1)
    for group in range(groups):
        given = [x.data_ptr() + group * x.stride(0) * x.element_size() for x in (q, k, v, rows, positions, pages)]
        results = [None if sinks is None else sinks.data_ptr(), out[group].data_ptr(), lse[group].data_ptr()]
        run(ctypes.addressof(call), *given, *results, ctypes.addressof(wrong))
        if wrong.value >= 0:
            row, position = int(rows[group, wrong.value]), int(positions[group, wrong.value])
            raise IndexError(
                f"paged_attention: position {position} of row {row} is in no page: there are {pages.shape[1]} rows of "
                f"{pages.shape[2]} pages, and {places // page_size} pages in the pools"
            )
    return out, lse


@functools.lru_cache(maxsize=256)
def _call(*members: float) -> ctypes.Structure:
    """Sizes and parameters, which are the same in all layers of a step."""
    return _Call(*members)


def _supports(q: Tensor, k: Tensor, v: Tensor) -> bool:
    fits = q.shape[1] <= _MOST_TOKENS and q.shape[3] in _SIZES and q.numel() > 0
    return fits and q.dtype in _TYPES and q.device.type == "cpu" and k.is_contiguous() and v.is_contiguous()
