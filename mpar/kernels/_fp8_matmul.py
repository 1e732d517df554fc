"""FP8 product: a @ b^T, both contiguous along K. Tensor cores sum 128 products along K; float32 registers add up these sums.

The matrix units of Hopper keep about 14 bits of a sum in FP8 (DeepSeek-AI 2024, arXiv:2412.19437, sec. 3.3.2), so they make no
sum that is longer than one block of scales. Where blocks have scales of their own, each such sum is multiplied by them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpar.errors import KernelError
from mpar.kernels._fp8_support import fp8_matmul_supports
from mpar.kernels._launch import arch_of, describe, launch, tuned
from mpar.kernels._moe_support import loadable

__all__ = ["fp8_matmul"]


@triton.jit
def _fp8_matmul(
    a_desc, b_desc, a_scale_ptr, b_scale_ptr, y_ptr, M, N, K, a_scale_stride, b_scale_stride,
    BLOCKWISE: tl.constexpr, B_SQUARE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """One program per tile of y, in bands of BAND tiles of rows by all columns. A scale stride of 0: one scale for all rows."""
    num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    work = tl.program_id(0)
    first = work // (BAND * num_n) * BAND
    height = tl.minimum(num_m - first, BAND)
    m, n = (first + work % (BAND * num_n) % height) * BLOCK_M, work % (BAND * num_n) // height * BLOCK_N
    rows, columns = m + tl.arange(0, BLOCK_M), n + tl.arange(0, BLOCK_N)
    a_scale_ptrs = a_scale_ptr + rows.to(tl.int64) * a_scale_stride
    b_scale_ptrs = b_scale_ptr + (columns // BLOCK_K if B_SQUARE else columns).to(tl.int64) * b_scale_stride
    y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for block in tl.range(0, tl.cdiv(K, BLOCK_K)):
        a, b = a_desc.load([m, block * BLOCK_K]), b_desc.load([n, block * BLOCK_K])
        product = tl.dot(a, b.trans())
        if BLOCKWISE:
            a_scale = tl.load(a_scale_ptrs + block, mask=rows < M, other=0.0)
            if B_SQUARE and BLOCK_N == BLOCK_K:
                product *= (a_scale * tl.load(b_scale_ptr + n.to(tl.int64) // BLOCK_K * b_scale_stride + block))[:, None]
            else:
                b_scale = tl.load(b_scale_ptrs + block, mask=columns < N, other=0.0)
                product *= a_scale[:, None] * b_scale[None, :]
        y += product
    if not BLOCKWISE:
        a_scale = tl.load(a_scale_ptrs, mask=rows < M, other=0.0)
        y *= a_scale[:, None] * tl.load(b_scale_ptrs, mask=columns < N, other=0.0)[None, :]
    places = y_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(places, y.to(y_ptr.dtype.element_ty), mask=(rows < M)[:, None] & (columns < N)[None, :])


def fp8_matmul(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, a_block: str, b_block: str, dtype: torch.dtype
) -> Tensor:
    """The product of the two matrices that the quantised operands stand for; see `mpar.ops.fp8_matmul`."""
    reason = fp8_matmul_supports(arch_of(a), a, a_scale, b, b_scale, a_block=a_block, b_block=b_block, dtype=dtype)
    if reason is not None:
        raise KernelError(f"fp8_matmul: {reason}")
    M, N, K = a.shape[0], b.shape[0], a.shape[1]
    y = torch.empty((M, N), dtype=dtype, device=a.device)
    if not y.numel():
        return y
    if not K:
        return y.zero_()
    a, a_scale, b, b_scale = loadable(a), a_scale.contiguous(), loadable(b), b_scale.contiguous()
    blockwise = a_block == "1x128"
    entry = tuned("fp8_matmul", a, "block" if blockwise else "row")
    m, n, k = (entry.blocks[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    grid = (triton.cdiv(M, m) * triton.cdiv(N, n),)
    strides = (0 if block == "tensor" else scale.shape[1] for scale, block in ((a_scale, a_block), (b_scale, b_block)))
    operands = (describe(a, (m, k)), describe(b, (n, k)), a_scale, b_scale, y, M, N, K, *strides)
    launch(_fp8_matmul, grid, *operands, on=a, tuning=entry, BLOCKWISE=blockwise, B_SQUARE=b_block == "128x128")
    return y
