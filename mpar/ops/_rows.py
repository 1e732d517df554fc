"""Rows: norms, activations, rotations, softmax, largest numbers on a CPU by mpar's C++ (mpar/cpp/rows.cpp), in one pass each.

Operands are of float32 or, but for softmax, of bfloat16. Each function gives None where there is no kernel for its operands; then
torch's ops do the same in several passes.
"""

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Parameter

from mpar.cpp import cpp_function, cpp_structure

__all__ = [
    "largest_of_rows",
    "rms_norm_backward_rows",
    "rms_norm_rows",
    "rotated_rows",
    "softmax_rows",
    "softmax_statistics_rows",
    "softmax_takes",
    "swiglu_backward_rows",
    "swiglu_rows",
]

_STRIP = 64
"""`STRIP` of rows.cpp."""
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_Gated = cpp_structure("_Gated", ["rows", "size", "gate_row", "up_row"], [])
_Norm = cpp_structure("_Norm", ["rows", "size"], ["eps"])
_Logits = cpp_structure("_Logits", ["rows", "columns", "x_row", "y_row"], [])
_Rotation = cpp_structure(
    "_Rotation",
    [
        *("batch", "positions", "heads", "size", "half", "interleaved"),
        *(f"{name}_{dim}" for name in "xy" for dim in ("batch", "position", "head")),
        "table_batch",
    ],
    [],
)


def swiglu_rows(gate: Tensor, up: Tensor) -> Tensor | None:
    """`silu(gate) * up`."""
    run = _function("swiglu", 4, gate, up)
    if run is None:
        return None
    width = gate.numel() if gate.is_contiguous() and up.is_contiguous() else gate.shape[-1]
    gates, ups = (_in_rows(x, width) for x in (gate, up))
    y = torch.empty_like(gate, memory_format=torch.contiguous_format)
    call = _Gated(*gates.shape, gates.stride(0), ups.stride(0))
    run(call, gates, ups, y)
    return y


def swiglu_backward_rows(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor] | None:
    """`(dgate, dup)`."""
    run = _function("swiglu_backward", 6, gate, up, dy)
    if run is None:
        return None
    gate, up, dy = gate.contiguous(), up.contiguous(), dy.contiguous()
    dgate, dup = torch.empty_like(gate), torch.empty_like(gate)
    run(gate, up, dy, dgate, dup, gate.numel())
    return dgate, dup


def rms_norm_rows(x: Tensor, weight: Tensor | None, eps: float) -> Tensor | None:
    """`x` with rows of a mean square of one, times the weight if there is one."""
    run = _function("rms_norm", 4, x, weight)
    if run is None:
        return None
    x, weight = x.contiguous(), None if weight is None else weight.contiguous()
    y, norm = torch.empty_like(x), _norm(x.shape, eps)  # a cache may lose it while the kernel reads it
    run(norm, x, weight, y)
    return y


def rms_norm_backward_rows(x: Tensor, weight: Tensor | None, dy: Tensor, eps: float) -> tuple[Tensor, Tensor | None] | None:
    """`(dx, dweight)`; no gradient of a weight that is missing."""
    run = _function("rms_norm_backward", 7, x, weight, dy)
    if run is None:
        return None
    x, dy, weight = x.contiguous(), dy.contiguous(), None if weight is None else weight.contiguous()
    norm, size = _norm(x.shape, eps), x.shape[-1]
    dx, dweight = torch.empty_like(x), None if weight is None else torch.empty_like(weight)
    strips = torch.empty(0 if weight is None else (-(-norm.rows // _STRIP) + 1) * size, dtype=torch.float32)
    run(norm, x, weight, dy, dx, dweight, strips)
    return dx, dweight


def rotated_rows(x: Tensor, cos: Tensor, sin: Tensor, y: Tensor | None, *, interleaved: bool) -> Tensor | None:
    """`x` (B, S, N, H) with pairs of features turned, written to `y`, which may be `x`, or to a new tensor."""
    run = _function("rotate", 5, x) if _are_plain(cos, sin) and x.stride(-1) == 1 else None
    if run is None:
        return None
    cos, sin = cos.contiguous(), sin.contiguous()
    y = torch.empty_like(x, memory_format=torch.contiguous_format) if y is None else y
    table = 0 if cos.shape[0] == 1 else cos.stride(0)
    rotation = _rotation(x.shape, cos.shape[2], interleaved, x.stride()[:3], y.stride()[:3], table)
    run(rotation, x, cos, sin, y)
    return y


def _in_rows(x: Tensor, width: int) -> Tensor:
    """Rows of so many numbers, each in one piece of memory. The halves of a joined product are not copied."""
    rows = x.reshape(-1, width)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def largest_of_rows(x_TV: Tensor) -> tuple[Tensor, Tensor] | None:
    """The largest number of each row and its place, as `torch.max` gives them."""
    run = cpp_function("rows", "largest", 4)
    if run is None or not _are_plain(x_TV) or x_TV.stride(-1) != 1:
        return None
    values, places = x_TV.new_empty(x_TV.shape[0]), x_TV.new_empty(x_TV.shape[0], dtype=torch.int64)
    run(_Logits(*x_TV.shape, x_TV.stride(0), 0), x_TV, values, places)
    return values, places


def softmax_takes(*tensors: Tensor) -> bool:
    """Whether there are kernels for the softmax of rows of these."""
    fits = _are_plain(*tensors) and all(x.stride(-1) == 1 for x in tensors)
    return fits and cpp_function("rows", "softmax", 5) is not None


def softmax_statistics_rows(x_TV: Tensor, column_T: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Of each row of logits: the log of the sum of exponentials, the logit in its `column_T`, and the log of its probability."""
    run = cpp_function("rows", "softmax_statistics", 6)
    if run is None or not softmax_takes(x_TV):
        return None
    column_T, call = column_T.contiguous(), _Logits(*x_TV.shape, x_TV.stride(0), 0)
    lse, target, logp = (x_TV.new_empty(x_TV.shape[0]) for _ in range(3))
    run(call, x_TV, column_T, lse, target, logp)
    return lse, target, logp


def softmax_rows(x_TV: Tensor, lse_T: Tensor, scale_T: Tensor, y_TV: Tensor) -> Tensor | None:
    """`scale * exp(x - lse)`, written to `y_TV`, which may be `x_TV`."""
    run = cpp_function("rows", "softmax", 5)
    if run is None or not softmax_takes(x_TV, y_TV) or not _are_plain(lse_T, scale_T):
        return None
    lse_T, scale_T, call = lse_T.contiguous(), scale_T.contiguous(), _Logits(*x_TV.shape, x_TV.stride(0), y_TV.stride(0))
    run(call, x_TV, lse_T, scale_T, y_TV)
    return y_TV


@functools.lru_cache(maxsize=256)
def _norm(shape: torch.Size, eps: float) -> ctypes.Structure:
    return _Norm(shape[:-1].numel(), shape[-1], eps)


@functools.lru_cache(maxsize=256)
def _rotation(
    shape: torch.Size, half: int, interleaved: bool, x_stride: tuple[int, ...], y_stride: tuple[int, ...], table: int
) -> ctypes.Structure:
    return _Rotation(*shape, half, interleaved, *x_stride, *y_stride, table)


def _function(name: str, num_operands: int, x: Tensor, *others: Tensor | None) -> Callable[..., None] | None:
    """The kernel for operands of the dtype of `x`."""
    fits = x.dtype in _NAMES and _are_plain(x, *others, dtype=x.dtype)
    return cpp_function("rows", f"{name}_{_NAMES[x.dtype]}", num_operands) if fits else None


def _are_plain(*tensors: Tensor | None, dtype: torch.dtype = torch.float32) -> bool:
    """Whether kernels can read these; a trace has tensors of other classes."""
    return all(
        x is None or (type(x) in (Tensor, Parameter) and x.dtype == dtype and x.device.type == "cpu" and x.numel() > 0)
        for x in tensors
    )
