"""Flash: attention of a block of queries and keys on a CPU, without all scores in memory, by mpar's kernel or torch's.

Mpar's C++ (mpar/cpp/attention.cpp) takes float32 on CPUs with AVX2 or AVX-512, and bfloat16 if the CPU does not compute in it;
torch's is for what is left.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mpar.cpp import cpp_function, cpp_structure
from mpar.torch_private import flash_attention_cpu, flash_attention_cpu_backward, onednn_has_bfloat16

__all__ = ["flash", "flash_backward"]

_NUMBERS = ("batch", "kv_heads", "groups", "queries", "keys", "size", "causal", "bias_batch", "parts")
_LAYOUTS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
_DIMS = ("batch", "head", "row")
_Call = cpp_structure("_Call", [*_NUMBERS, *(f"{name}_{dim}" for name in _LAYOUTS for dim in _DIMS)], ["scale"])
"""`Call` of attention.cpp."""
_SIZES = range(16, 257, 16)


def flash(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None, scale: float, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`(out_BNSH, lse_BNS)` of operands with heads first. causal: query i sees keys 0 to i. bias: (B or 1, 1, S, M), added to the
    scores; it has the dtype of `q`. out: what the result is written to, with the features side by side in memory."""
    run = _function("attention_forward", 7, q, k, v)
    if run is None:
        made, lse = flash_attention_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
        return made if out is None else out.copy_(made), lse
    q, k, v = map(_with_rows, (q, k, v))
    out, lse = _like_rows(q) if out is None else out, torch.empty(q.shape[:3], dtype=torch.float32)
    call, bias = _call({"q": q, "k": k, "v": v, "out": out}, causal, bias, scale)
    run(call, q, k, v, bias, out, lse)
    return out, lse


def flash_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    bias: Tensor | None,
    scale: float,
    into: Sequence[Tensor] | None = None,
) -> Sequence[Tensor]:
    """`[dq, dk, dv]`. `out` and `lse` may be those of more keys; `lse` is inf for queries that see none. into: what they are
    written to, with the features side by side in memory."""
    run = _function("attention_backward", 11, q, k, v)
    if run is None:
        made = flash_attention_cpu_backward(dout, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale)
        return made if into is None else [grad.copy_(part) for grad, part in zip(into, made, strict=True)]
    dout, q, k, v, out = map(_with_rows, (dout, q, k, v, out))
    lse = lse.contiguous()
    dq, dk, dv = map(_like_rows, (q, k, v)) if into is None else into
    layouts = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "dq": dq, "dk": dk, "dv": dv}
    call, bias = _call(layouts, causal, bias, scale)
    run(call, dout, q, k, v, out, lse, bias, dq, dk, dv)
    return dq, dk, dv


def _function(name: str, num_operands: int, q: Tensor, k: Tensor, v: Tensor) -> Callable[..., None] | None:
    """The kernel for operands of this dtype, if it takes these; a trace has tensors of other classes."""
    kernel = _kernel(q.dtype)
    fits = kernel is not None and q.shape[3] in _SIZES and k.shape == v.shape and k.numel() > 0 < q.numel()
    fits = fits and type(q) is type(k) is type(v) is Tensor and q.device.type == "cpu"
    return cpp_function("attention", f"{name}_{kernel}", num_operands) if fits else None


@functools.cache
def _kernel(dtype: torch.dtype) -> str | None:
    """What kernels for a dtype are called; none for bfloat16 where torch's compute in it."""
    if dtype == torch.bfloat16:
        return None if onednn_has_bfloat16() else "bfloat16"
    return "float32" if dtype == torch.float32 else None


def _with_rows(x: Tensor) -> Tensor:
    """The same tensor, the features of which are neighbours in memory."""
    return x if x.stride(3) == 1 else x.contiguous()


def _like_rows(x: Tensor) -> Tensor:
    """A tensor of the shape of `x`, (B, N, S, H), stored as (B, S, N, H)."""
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)


def _call(layouts: dict[str, Tensor], causal: bool, bias: Tensor | None, scale: float) -> tuple[ctypes.Structure, Tensor | None]:
    """The structure of a call, and the bias with all its rows side by side."""
    (batch, heads, queries, size), (_, kv_heads, keys, _) = layouts["q"].shape, layouts["k"].shape
    parts = -(-2 * torch.get_num_threads() // (batch * kv_heads)) if torch.get_num_threads() > 1 else 1
    bias = None if bias is None else bias.contiguous()
    bias_batch = 0 if bias is None or len(bias) == 1 else bias.stride(0)
    distances = [step for name in _LAYOUTS for step in (layouts[name].stride()[:3] if name in layouts else (0, 0, 0))]
    call = _Call(batch, kv_heads, heads // kv_heads, queries, keys, size, causal, bias_batch, parts, *distances, scale)
    return call, bias
