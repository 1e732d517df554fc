"""nf4 to floating numbers. Bandwidth-bound: reads half a byte of each weight and writes the weight.

The sixteen numbers of the codes are chosen by four selections on the bits of a code, in registers; those of the magnitudes are
read from a table of 1 KiB, once for 64 weights.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpar.errors import KernelError
from mpar.kernels._launch import arch_of, launch, tuned
from mpar.kernels._nf4_support import dequantise_nf4_supports
from mpar.ops import NF4_BLOCK, NF4_CODES, nf4_scale_codes

__all__ = ["dequantise_nf4"]

NESTED_BLOCK = 256
CODES = {f"V{i}": value for i, value in enumerate(NF4_CODES)}


@triton.jit
def _select(bit, low, high):
    return tl.where(bit != 0, high, low)


@triton.jit
def _number(
    code,
    V0: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, V3: tl.constexpr, V4: tl.constexpr, V5: tl.constexpr,
    V6: tl.constexpr, V7: tl.constexpr, V8: tl.constexpr, V9: tl.constexpr, V10: tl.constexpr, V11: tl.constexpr,
    V12: tl.constexpr, V13: tl.constexpr, V14: tl.constexpr, V15: tl.constexpr,
):  # fmt: skip
    """The number of a code of four bits."""
    a, b, c, d = code & 1, code & 2, code & 4, code & 8
    first = _select(c, _select(b, _select(a, V0, V1), _select(a, V2, V3)), _select(b, _select(a, V4, V5), _select(a, V6, V7)))
    last = _select(
        c, _select(b, _select(a, V8, V9), _select(a, V10, V11)), _select(b, _select(a, V12, V13), _select(a, V14, V15))
    )
    return _select(d, first, last)


@triton.jit
def _dequantise_nf4(
    codes_ptr, absmax_ptr, nested_ptr, offset_ptr, scale_codes_ptr, w_ptr, R, C, K, row_blocks, row_start, block_start,
    V0: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, V3: tl.constexpr, V4: tl.constexpr, V5: tl.constexpr,
    V6: tl.constexpr, V7: tl.constexpr, V8: tl.constexpr, V9: tl.constexpr, V10: tl.constexpr, V11: tl.constexpr,
    V12: tl.constexpr, V13: tl.constexpr, V14: tl.constexpr, V15: tl.constexpr,
    SIDE: tl.constexpr, NESTED: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program per ROWS rows of BLOCKS blocks of an expert; C: the blocks of a row of this shard."""
    expert = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    inside = (rows < R)[:, None] & (blocks < C)[None, :]
    place = (expert * R + rows)[:, None] * C + blocks[None, :]
    whole = (row_start + rows).to(tl.int64)[:, None] * row_blocks + (block_start + blocks)[None, :]
    scale = tl.load(scale_codes_ptr + tl.load(absmax_ptr + place, mask=inside, other=0))
    nested = tl.load(nested_ptr + expert * K + whole // NESTED, mask=inside, other=0.0)
    scale = scale * nested + tl.load(offset_ptr + expert)
    half: tl.constexpr = SIDE // 2
    bytes_ = place[:, :, None] * half + tl.arange(0, half)[None, None, :]
    pair = tl.load(codes_ptr + bytes_, mask=inside[:, :, None], other=0)
    high = _number(pair >> 4, V0, V1, V2, V3, V4, V5, V6, V7, V8, V9, V10, V11, V12, V13, V14, V15)
    low = _number(pair & 15, V0, V1, V2, V3, V4, V5, V6, V7, V8, V9, V10, V11, V12, V13, V14, V15)
    w = tl.interleave(high * scale[:, :, None], low * scale[:, :, None])
    columns = place[:, :, None] * SIDE + tl.arange(0, SIDE)[None, None, :]
    tl.store(w_ptr + columns, w.to(w_ptr.dtype.element_ty), mask=inside[:, :, None])


@functools.cache
def _scale_codes(device: torch.device) -> Tensor:
    return torch.tensor(nf4_scale_codes(), dtype=torch.float32, device=device)


def dequantise_nf4(
    codes: Tensor, absmax: Tensor, nested: Tensor, offset: Tensor, *, dtype: torch.dtype, row_blocks: int, starts: list[int]
) -> Tensor:
    """The weights of codes; see `mpar.ops.dequantise_nf4`."""
    reason = dequantise_nf4_supports(arch_of(codes), codes, absmax, nested, offset, dtype=dtype)
    if reason is not None:
        raise KernelError(f"dequantise_nf4: {reason}")
    w = torch.empty((*codes.shape[:-1], 2 * codes.shape[-1]), dtype=dtype, device=codes.device)
    if w.numel():
        (R, C), experts = absmax.shape[-2:], absmax.shape[0] if absmax.ndim == 3 else 1
        entry = tuned("dequantise_nf4", codes)
        grid = (triton.cdiv(R, entry.blocks["ROWS"]), triton.cdiv(C, entry.blocks["BLOCKS"]), experts)
        parts = codes.contiguous(), absmax.contiguous(), nested.contiguous().view(torch.float32), offset.view(torch.float32)
        sizes = (R, C, nested.shape[-1], row_blocks, *starts)
        operands = (*parts, _scale_codes(codes.device), w, *sizes)
        launch(_dequantise_nf4, grid, *operands, on=codes, tuning=entry, SIDE=NF4_BLOCK, NESTED=NESTED_BLOCK, **CODES)
    return w
