"""SwiGLU: silu(gate) * up in one kernel, and both gradients in another.

Bandwidth-bound: for each element of the result the forward moves 3 elements to or from memory, the backward 5.
"""

import triton
import triton.language as tl
from torch import Tensor

from mpar.kernels._gates import launch_gate

__all__ = ["swiglu", "swiglu_bwd"]


@triton.jit
def _swiglu_fwd(gate_ptr, up_ptr, y_ptr, D, blocks, gate_stride, up_stride, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // blocks).to(tl.int64)  # int32 offsets would overflow at 2**31 elements
    columns = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < D
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(y_ptr + row * D + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_bwd(
    gate_ptr, up_ptr, dy_ptr, dgate_ptr, dup_ptr, D, blocks, gate_stride, up_stride, dy_stride, BLOCK: tl.constexpr
):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < D
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * dy_stride + columns, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    dgate = dy * up * (sigmoid + silu * (1 - sigmoid))
    tl.store(dgate_ptr + row * D + columns, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + row * D + columns, (dy * silu).to(dup_ptr.dtype.element_ty), mask=inside)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`; see `mpar.ops.swiglu`."""
    return launch_gate(_swiglu_fwd, "swiglu_fwd", (gate, up), 1)[0]


def swiglu_bwd(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `gate` and `up`."""
    dgate, dup = launch_gate(_swiglu_bwd, "swiglu_bwd", (gate, up, dy), 2)
    return dgate, dup
