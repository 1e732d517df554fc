"""Few tokens: paged attention on a CPU of tokens each of which reads keys and values where they lie (mpar/cpp)."""

import ctypes
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from mpar.cpp import after_calls, cpp_function, cpp_structure

__all__ = ["few_tokens"]

_SIZES = range(16, 1025, 16)
_TYPES: Mapping[torch.dtype, str] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_NUMBERS = (
    *("batch", "tokens", "q_batch", "q_distance", "kv_heads", "groups", "size", "places"),
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
    if q.device.type != "cpu" or not k.is_contiguous() or not v.is_contiguous():
        return None
    q = q if q.stride()[2:] == (q.shape[3], 1) else q.contiguous()
    sizes = page_size, window or 0, shard, scale, soft_cap or 0.0
    plan = _plan(q.dtype, q.shape, q.stride(), k.shape, pages.shape, *sizes)
    if plan is None:
        return None
    run, call = plan
    rows, positions, pages = rows.contiguous(), positions.contiguous(), pages.contiguous()
    sinks = None if sinks is None else sinks.float().contiguous()
    out, lse, wrong = torch.empty(q.shape, dtype=q.dtype), torch.empty(q.shape[:3], dtype=torch.float32), ctypes.c_int64(-1)
    run(call, q, k, v, rows, positions, pages, sinks, out, lse, wrong)

    def check() -> None:
        if wrong.value >= 0:
            row, position = int(rows.flatten()[wrong.value]), int(positions.flatten()[wrong.value])
            raise IndexError(
                f"paged_attention: position {position} of row {row} is in no page: there are {pages.shape[1]} rows of "
                f"{pages.shape[2]} pages, and {k.shape[1] // page_size} pages in the pools"
            )

    after_calls(check)
    return out, lse


@functools.lru_cache(maxsize=256)
def _plan(
    dtype: torch.dtype,
    shape_q: Sequence[int],
    stride_q: Sequence[int],
    shape_k: Sequence[int],
    shape_pages: Sequence[int],
    page_size: int,
    window: int,
    shard: bool,
    scale: float,
    soft_cap: float,
) -> tuple[Callable[..., None], ctypes.Structure] | None:
    """The kernel for such operands, if there is one, and the structure that it reads, the same in all layers of a step."""
    (batch, tokens, heads, size), (_, places, kv_heads, _) = shape_q, shape_k
    if size not in _SIZES or dtype not in _TYPES or not math.prod(shape_q):
        return None
    run = cpp_function("paged_attention", f"paged_attention_{_TYPES[dtype]}", 11)
    of_q = batch, tokens, *stride_q[:2], kv_heads, heads // kv_heads, size
    return None if run is None else (run, _Call(*of_q, places, *shape_pages[1:], page_size, window, shard, scale, soft_cap))
