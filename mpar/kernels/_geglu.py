"""GEGLU: gelu(gate) * up in one kernel, and both gradients in another.

Bandwidth-bound: for each element of the result the forward moves 3 elements to or from memory, the backward 5.
"""

import triton
import triton.language as tl
from torch import Tensor

from mpar.kernels._gates import launch_gate

__all__ = ["geglu", "geglu_bwd"]


@triton.jit
def _gelu(gate, TANH: tl.constexpr):
    """gelu(gate) and its slope. With p the probability by which the gate is passed, gelu = gate p and slope = p + gate p'."""
    if TANH:  # (1 + tanh(u)) / 2 is sigmoid(2 u), which keeps its digits where p is small
        p = tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))  # 2 sqrt(2 / pi)
        dp = p * (1 - p) * 1.5957691216057308 * (1 + 0.134145 * gate * gate)
    else:
        p = 0.5 + 0.5 * tl.erf(gate * 0.7071067811865476)
        dp = 0.3989422804014327 * tl.exp(-0.5 * gate * gate)  # the normal density
    return gate * p, p + gate * dp


@triton.jit
def _geglu_fwd(gate_ptr, up_ptr, y_ptr, D, blocks, gate_stride, up_stride, TANH: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // blocks).to(tl.int64)  # int32 offsets would overflow at 2**31 elements
    columns = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < D
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    gelu, _ = _gelu(gate, TANH)
    tl.store(y_ptr + row * D + columns, (gelu * up).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _geglu_bwd(
    gate_ptr,
    up_ptr,
    dy_ptr,
    dgate_ptr,
    dup_ptr,
    D,
    blocks,
    gate_stride,
    up_stride,
    dy_stride,
    TANH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < D
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * dy_stride + columns, mask=inside, other=0.0).to(tl.float32)
    gelu, slope = _gelu(gate, TANH)
    tl.store(dgate_ptr + row * D + columns, (dy * up * slope).to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + row * D + columns, (dy * gelu).to(dup_ptr.dtype.element_ty), mask=inside)


def geglu(gate: Tensor, up: Tensor, *, approximate: str) -> Tensor:
    """`gelu(gate) * up`; see `mpar.ops.geglu`."""
    return launch_gate(_geglu_fwd, "geglu_fwd", (gate, up), 1, TANH=approximate == "tanh")[0]


def geglu_bwd(gate: Tensor, up: Tensor, dy: Tensor, *, approximate: str) -> tuple[Tensor, Tensor]:
    """Gradients of `gate` and `up`."""
    dgate, dup = launch_gate(_geglu_bwd, "geglu_bwd", (gate, up, dy), 2, TANH=approximate == "tanh")
    return dgate, dup
