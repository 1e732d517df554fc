"""Merge of attention over two sets of keys, and its gradient, each in one kernel.

Bandwidth-bound: for each element of the result the forward moves 3 elements to or from memory, the backward 5.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpar.errors import KernelError
from mpar.kernels._attention_support import merge_supports
from mpar.kernels._launch import Kernel, arch_of, launch, tuned

__all__ = ["merge_attention", "merge_attention_bwd"]


@triton.jit
def _shares(lse_a, lse_b):
    top = tl.maximum(lse_a, lse_b)
    level = tl.where(top == float("-inf"), 0.0, top)  # -inf - -inf would be NaN
    share_a, share_b = tl.exp(lse_a - level), tl.exp(lse_b - level)
    total = share_a + share_b
    norm = tl.where(total == 0, 1.0, total)
    return level + tl.log(total), share_a / norm, share_b / norm


@triton.jit
def _merge_fwd(
    out_a_ptr, lse_a_ptr, out_b_ptr, lse_b_ptr, out_ptr, lse_ptr, num_rows,
    HEAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # int32 would overflow at 2**31 elements
    features = tl.arange(0, HEAD)[None, :]
    inside = rows < num_rows
    where = rows[:, None] * HEAD + features
    mask = inside[:, None]
    lse_a = tl.load(lse_a_ptr + rows, mask=inside, other=float("-inf"))
    lse_b = tl.load(lse_b_ptr + rows, mask=inside, other=float("-inf"))
    out_a = tl.load(out_a_ptr + where, mask=mask, other=0.0).to(tl.float32)
    out_b = tl.load(out_b_ptr + where, mask=mask, other=0.0).to(tl.float32)
    lse, share_a, share_b = _shares(lse_a, lse_b)
    out = share_a[:, None] * out_a + share_b[:, None] * out_b
    tl.store(lse_ptr + rows, lse, mask=inside)
    tl.store(out_ptr + where, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _merge_bwd(
    out_a_ptr, lse_a_ptr, out_b_ptr, lse_b_ptr, dout_ptr, dlse_ptr, dout_a_ptr, dlse_a_ptr, dout_b_ptr, dlse_b_ptr, num_rows,
    HEAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    features = tl.arange(0, HEAD)[None, :]
    inside = rows < num_rows
    where = rows[:, None] * HEAD + features
    mask = inside[:, None]
    lse_a = tl.load(lse_a_ptr + rows, mask=inside, other=float("-inf"))
    lse_b = tl.load(lse_b_ptr + rows, mask=inside, other=float("-inf"))
    out_a = tl.load(out_a_ptr + where, mask=mask, other=0.0).to(tl.float32)
    out_b = tl.load(out_b_ptr + where, mask=mask, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + where, mask=mask, other=0.0).to(tl.float32)
    _, share_a, share_b = _shares(lse_a, lse_b)
    slope = tl.sum(dout * (out_a - out_b), 1)
    dlse_a, dlse_b = share_a * share_b * slope, -share_a * share_b * slope
    if dlse_ptr is not None:
        dlse = tl.load(dlse_ptr + rows, mask=inside, other=0.0)
        dlse_a += tl.where(share_a == 0, 0.0, share_a * dlse)  # where nothing is seen dlse may be NaN
        dlse_b += tl.where(share_b == 0, 0.0, share_b * dlse)
    tl.store(dlse_a_ptr + rows, dlse_a, mask=inside)
    tl.store(dlse_b_ptr + rows, dlse_b, mask=inside)
    tl.store(dout_a_ptr + where, (share_a[:, None] * dout).to(dout_a_ptr.dtype.element_ty), mask=mask)
    tl.store(dout_b_ptr + where, (share_b[:, None] * dout).to(dout_b_ptr.dtype.element_ty), mask=mask)


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both partial results; see `mpar.ops.merge_attention`."""
    _check(out_a, lse_a, out_b)
    operands = [x.contiguous() for x in (out_a, lse_a, out_b, lse_b)]
    out = torch.empty(out_a.shape, dtype=torch.promote_types(out_a.dtype, out_b.dtype), device=out_a.device)
    lse = torch.empty(lse_a.shape, dtype=lse_a.dtype, device=lse_a.device)
    _launch_rows(_merge_fwd, "merge_attention_fwd", *operands, out, lse)
    return out, lse


def merge_attention_bwd(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, dout: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of both partial results and of their log-sum-exps."""
    _check(out_a, lse_a, out_b)
    dout = torch.zeros_like(out_a) if dout is None else dout
    operands = [x.contiguous() for x in (out_a, lse_a, out_b, lse_b, dout)]
    dlse = None if dlse is None else dlse.contiguous()
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (out_a, lse_a, out_b, lse_b)]
    _launch_rows(_merge_bwd, "merge_attention_bwd", *operands, dlse, *grads)
    return grads[0], grads[1], grads[2], grads[3]


def _check(out_a: Tensor, lse_a: Tensor, out_b: Tensor) -> None:
    reason = merge_supports(arch_of(out_a), out_a, lse_a, out_b)
    if reason is not None:
        raise KernelError(f"merge_attention of {tuple(out_a.shape)}: {reason}. Use mpar.ops.merge_attention.")


def _launch_rows(kernel: Kernel, name: str, out_a: Tensor, lse_a: Tensor, *others: Tensor | None) -> None:
    num_rows = lse_a.numel()
    if not num_rows:
        return
    entry = tuned(name, out_a)
    grid = (triton.cdiv(num_rows, entry.blocks["ROWS"]),)
    launch(kernel, grid, out_a, lse_a, *others, num_rows, on=out_a, tuning=entry, HEAD=out_a.shape[3])
