"""Cross-entropy: one Triton program for each row of logits. Bandwidth-bound.

A row is read once for the loss, and read and written once for the gradient. It is read in groups of 16 bytes that are aligned in
memory, whatever its width: where rows do not begin at such a group, the columns before the first whole group and behind the last
one are read separately. Each group of a block keeps a maximum and a sum of its own, so that no thread waits for another before
the end of the row.
"""

from typing import TypedDict, Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpar.errors import KernelError
from mpar.kernels._catalogue import floating
from mpar.kernels._launch import arch_of, launch, tuned
from mpar.kernels._table import Tuning

__all__ = [
    "LossParams",
    "RowParams",
    "check_dtypes",
    "cross_entropy",
    "cross_entropy_bwd",
    "cross_entropy_stats",
    "fused_rows",
    "gradient_rows",
    "loss_rows",
]

class RowParams(TypedDict):
    """The parameters on which the loss of a row depends besides its logits and label; see `mpar.ops.cross_entropy`."""

    ignore_index: int
    vocab_size: int
    label_smoothing: float


class LossParams(RowParams):
    """The same for rows that hold a shard of the vocabulary, whose first column is `start`."""

    start: int


NUMBERS = ["num_columns", "width", "start", "vocab_size", "ignore_index"]
"""Arguments that kernels are not specialised on: one binary serves every shard and every vocabulary."""


@triton.jit
def _place(row, num_columns, GROUP: tl.constexpr, RAGGED: tl.constexpr):
    """Where a row's whole groups lie: offset of the first, the column it starts with, their number, the column after them."""
    begin = row * num_columns
    first = (begin + GROUP - 1) // GROUP
    num_groups = num_columns // GROUP
    head = 0
    if RAGGED:
        head = tl.minimum(first * GROUP - begin, num_columns).to(tl.int32)
        num_groups = tl.maximum((begin + num_columns) // GROUP - first, 0).to(tl.int32)
    return first * GROUP, head, num_groups, head + num_groups * GROUP


@triton.jit
def _margin(head, tail, num_columns, GROUP: tl.constexpr):
    """Columns of a row before its first and behind its last whole group, and which of these there are."""
    lanes = tl.arange(0, 2 * GROUP)
    columns = tl.where(lanes < GROUP, lanes, tail + lanes - GROUP)
    return columns, columns < tl.where(lanes < GROUP, head, num_columns)


@triton.jit
def _gather(peak_R, sum_R, total_R, x_RK, SMOOTHED: tl.constexpr):
    """Online maximum, sum of exponentials and, to smooth labels, sum, with one more tile. A group of -inf alone has sum 0."""
    new_peak_R = tl.maximum(peak_R, tl.max(x_RK, 1))
    shift_R = tl.where(new_peak_R == float("-inf"), 0.0, new_peak_R)
    sum_R = sum_R * tl.exp(peak_R - shift_R) + tl.sum(tl.exp(x_RK - shift_R[:, None]), 1)
    if SMOOTHED:
        total_R += tl.sum(x_RK, 1)
    return new_peak_R, sum_R, total_R


@triton.jit
def _row_statistics(
    x_ptr, row, num_columns, width, GROUP: tl.constexpr, RAGGED: tl.constexpr, SMOOTHED: tl.constexpr, BLOCK: tl.constexpr
):
    """A finite number near the row's maximum, the logarithm of the sum of exponentials relative to it, and the sum of the row."""
    R: tl.constexpr = BLOCK // GROUP
    place, head, num_groups, tail = _place(row, num_columns, GROUP, RAGGED)
    groups_R, lanes_K = tl.arange(0, R), tl.arange(0, GROUP)
    offsets_RK = groups_R[:, None] * GROUP + lanes_K[None, :]
    base_ptr = x_ptr + place
    peak_R = tl.full((R,), float("-inf"), tl.float32)
    sum_R, total_R = tl.zeros((R,), tl.float32), tl.zeros((R,), tl.float32)
    behind = tl.maximum(width - head, 0)
    num_whole = tl.minimum(behind // GROUP, num_groups) // R * R
    for group in range(0, num_whole, R):
        x_RK = tl.load(base_ptr + group * GROUP + offsets_RK).to(tl.float32)
        peak_R, sum_R, total_R = _gather(peak_R, sum_R, total_R, x_RK, SMOOTHED)
    # a mask per group keeps the loads whole; padding columns are masked after
    live_R = num_whole + groups_R < tl.minimum((behind + GROUP - 1) // GROUP, num_groups)
    x_RK = tl.load(base_ptr + num_whole * GROUP + offsets_RK, mask=live_R[:, None], other=0.0).to(tl.float32)
    inside_RK = live_R[:, None] & (num_whole * GROUP + offsets_RK < behind)
    peak_R, sum_R, _ = _gather(peak_R, sum_R, total_R, tl.where(inside_RK, x_RK, float("-inf")), False)
    if SMOOTHED:
        total_R += tl.sum(tl.where(inside_RK, x_RK, 0.0), 1)
    top = tl.max(peak_R, 0)
    if RAGGED:
        columns_E, there_E = _margin(head, tail, num_columns, GROUP)
        there_E &= columns_E < width
        x_E = tl.load(x_ptr + row * num_columns + columns_E, mask=there_E, other=0.0).to(tl.float32)
        bounded_E = tl.where(there_E, x_E, float("-inf"))
        top = tl.maximum(top, tl.max(bounded_E, 0))
    shift = tl.where(top == float("-inf"), 0.0, top)
    total_exp, total = tl.sum(sum_R * tl.exp(peak_R - shift), 0), tl.sum(total_R, 0)
    if RAGGED:
        total_exp += tl.sum(tl.exp(bounded_E - shift), 0)
        total += tl.sum(tl.where(there_E, x_E, 0.0), 0)
    return shift, tl.log(total_exp), total


@triton.jit
def _label(labels_ptr, row, width, start, vocab_size, ignore_index):
    """The column of a row's label, -1 if the row does not hold it; whether it is ignored; whether it exists."""
    label = tl.load(labels_ptr + row).to(tl.int64)
    ignored = label == ignore_index
    known = (label >= 0) & (label < vocab_size)
    column = label - start
    held = known & (column >= 0) & (column < width) & (ignored == 0)
    return tl.where(held, column, -1), ignored, known


@triton.jit
def _target(x, total, ignored, known, smoothing, share, SMOOTHED: tl.constexpr):
    """What this row's columns add to the target's logit."""
    if SMOOTHED:
        x = (1.0 - smoothing) * x + share * total
    return tl.where(ignored, 0.0, tl.where(known, x, float("nan")))


@triton.jit
def _slope(x, columns, column, lse, scale, hot, flat, SMOOTHED: tl.constexpr):
    """`softmax * scale - onehot * hot - flat`."""
    dx = tl.exp(x - lse) * scale - tl.where(columns == column, hot, 0.0)
    return dx - flat if SMOOTHED else dx


@triton.jit
def _row_gradient(
    x_ptr,
    dx_ptr,
    row,
    num_columns,
    width,
    column,
    lse,
    scale,
    hot,
    flat,
    GROUP: tl.constexpr,
    RAGGED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a row's gradient, which may overwrite the row: every thread reads what it writes, and reads it before."""
    R: tl.constexpr = BLOCK // GROUP
    dtype = dx_ptr.dtype.element_ty
    place, head, num_groups, tail = _place(row, num_columns, GROUP, RAGGED)
    groups_R, lanes_K = tl.arange(0, R), tl.arange(0, GROUP)
    offsets_RK = groups_R[:, None] * GROUP + lanes_K[None, :]
    column = column.to(tl.int32)
    num_whole = tl.minimum(tl.maximum(width - head, 0) // GROUP, num_groups) // R * R
    for group in range(0, num_whole, R):
        x_RK = tl.load(x_ptr + place + group * GROUP + offsets_RK).to(tl.float32)
        dx_RK = _slope(x_RK, head + group * GROUP + offsets_RK, column, lse, scale, hot, flat, SMOOTHED)
        tl.store(dx_ptr + place + group * GROUP + offsets_RK, dx_RK.to(dtype))
    for group in range(num_whole, num_groups, R):
        live_R = group + groups_R < num_groups
        columns_RK = head + group * GROUP + offsets_RK
        x_RK = tl.load(x_ptr + place + group * GROUP + offsets_RK, mask=live_R[:, None], other=0.0).to(tl.float32)
        dx_RK = tl.where(columns_RK < width, _slope(x_RK, columns_RK, column, lse, scale, hot, flat, SMOOTHED), 0.0)
        tl.store(dx_ptr + place + group * GROUP + offsets_RK, dx_RK.to(dtype), mask=live_R[:, None])
    if RAGGED:
        columns_E, there_E = _margin(head, tail, num_columns, GROUP)
        offset = row * num_columns
        x_E = tl.load(x_ptr + offset + columns_E, mask=there_E, other=0.0).to(tl.float32)
        dx_E = tl.where(columns_E < width, _slope(x_E, columns_E, column, lse, scale, hot, flat, SMOOTHED), 0.0)
        tl.store(dx_ptr + offset + columns_E, dx_E.to(dtype), mask=there_E)


@triton.jit(do_not_specialize=NUMBERS)
def _cross_entropy_fwd(
    x_ptr,
    labels_ptr,
    lse_ptr,
    second_ptr,
    num_columns,
    width,
    start,
    vocab_size,
    ignore_index,
    smoothing,
    share,
    GROUP: tl.constexpr,
    RAGGED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    LOSS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # int32 row * num_columns overflows at 2**31 elements
    column, ignored, known = _label(labels_ptr, row, width, start, vocab_size, ignore_index)
    x = tl.load(x_ptr + row * num_columns + column, mask=column >= 0, other=0.0).to(tl.float32)
    shift, log_sum, total = _row_statistics(x_ptr, row, num_columns, width, GROUP, RAGGED, SMOOTHED, BLOCK)
    second = _target(x, total, ignored, known, smoothing, share, SMOOTHED)
    if LOSS:  # the difference of what is large first: a common offset of the logits costs no digits
        second = tl.where(ignored, 0.0, (shift - second) + log_sum)
    tl.store(lse_ptr + row, shift + log_sum)
    tl.store(second_ptr + row, second)


@triton.jit(do_not_specialize=NUMBERS)
def _cross_entropy_bwd(
    x_ptr,
    labels_ptr,
    lse_ptr,
    dloss_ptr,
    dlse_ptr,
    dx_ptr,
    num_columns,
    width,
    start,
    vocab_size,
    ignore_index,
    smoothing,
    share,
    GROUP: tl.constexpr,
    RAGGED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column, ignored, _ = _label(labels_ptr, row, width, start, vocab_size, ignore_index)
    dloss, scale = 0.0, 0.0
    if dloss_ptr is not None:
        dloss = tl.where(ignored, 0.0, tl.load(dloss_ptr + row).to(tl.float32))
        scale = dloss
    if dlse_ptr is not None:
        scale += tl.load(dlse_ptr + row).to(tl.float32)
    lse, hot, flat = tl.load(lse_ptr + row), (1.0 - smoothing) * dloss, share * dloss
    _row_gradient(x_ptr, dx_ptr, row, num_columns, width, column, lse, scale, hot, flat, GROUP, RAGGED, SMOOTHED, BLOCK)


@triton.jit(do_not_specialize=NUMBERS)
def _cross_entropy_both(
    x_ptr,
    labels_ptr,
    dloss_ptr,
    lse_ptr,
    loss_ptr,
    num_columns,
    width,
    start,
    vocab_size,
    ignore_index,
    smoothing,
    share,
    GROUP: tl.constexpr,
    RAGGED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column, ignored, known = _label(labels_ptr, row, width, start, vocab_size, ignore_index)
    x = tl.load(x_ptr + row * num_columns + column, mask=column >= 0, other=0.0).to(tl.float32)
    dloss = tl.where(ignored, 0.0, tl.load(dloss_ptr + row).to(tl.float32))
    shift, log_sum, total = _row_statistics(x_ptr, row, num_columns, width, GROUP, RAGGED, SMOOTHED, BLOCK)
    target = _target(x, total, ignored, known, smoothing, share, SMOOTHED)
    lse, hot, flat = shift + log_sum, (1.0 - smoothing) * dloss, share * dloss
    tl.store(lse_ptr + row, lse)
    tl.store(loss_ptr + row, tl.where(ignored, 0.0, (shift - target) + log_sum))
    tl.debug_barrier()  # all threads have read the label's logit before any overwrites the row
    _row_gradient(x_ptr, x_ptr, row, num_columns, width, column, lse, dloss, hot, flat, GROUP, RAGGED, SMOOTHED, BLOCK)


def cross_entropy(logits: Tensor, labels: Tensor, **params: Unpack[LossParams]) -> tuple[Tensor, Tensor]:
    """`(loss, lse)` of each token; see `mpar.ops.cross_entropy`."""
    check_dtypes("cross_entropy", logits)
    loss, lse = (torch.empty(labels.shape, dtype=torch.float32, device=logits.device) for _ in range(2))
    loss_rows(_rows(logits), labels.reshape(-1), lse.view(-1), loss.view(-1), loss=True, **params)
    return loss, lse


def cross_entropy_stats(logits: Tensor, labels: Tensor, **params: Unpack[LossParams]) -> tuple[Tensor, Tensor]:
    """`(lse, target)` of each token over the columns that `logits` has."""
    check_dtypes("cross_entropy_stats", logits)
    lse, target = (torch.empty(labels.shape, dtype=torch.float32, device=logits.device) for _ in range(2))
    loss_rows(_rows(logits), labels.reshape(-1), lse.view(-1), target.view(-1), loss=False, **params)
    return lse, target


def cross_entropy_bwd(
    logits: Tensor, labels: Tensor, lse: Tensor, dloss: Tensor | None, dlse: Tensor | None, **params: Unpack[LossParams]
) -> Tensor:
    """The gradient of `logits`."""
    check_dtypes("cross_entropy_bwd", logits, lse, dloss, dlse)
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    dloss_T, dlse_T = (None if x is None else x.reshape(-1) for x in (dloss, dlse))
    out_TV = dlogits.view(-1, logits.shape[-1])
    gradient_rows(_rows(logits), labels.reshape(-1), lse.reshape(-1), dloss_T, dlse_T, out_TV, **params)
    return dlogits


def check_dtypes(name: str, *operands: Tensor | None) -> None:
    """Raise KernelError if an operand has a dtype that kernels do not take."""
    reason = floating(arch_of(next(x for x in operands if x is not None)), *operands)
    if reason is not None:
        raise KernelError(f"{name}: {reason}")


def loss_rows(
    logits_TV: Tensor, labels_T: Tensor, lse_T: Tensor, second_T: Tensor, *, loss: bool, **params: Unpack[LossParams]
) -> None:
    """Write the log-sum-exp of each row to `lse_T`, and its loss, or without `loss` its target, to `second_T`."""
    if labels_T.numel():
        entry, constants = _tuned("cross_entropy_fwd", logits_TV), _constants(logits_TV, params)
        args = (logits_TV, labels_T.contiguous(), lse_T, second_T, *_numbers(logits_TV, **params))
        launch(_cross_entropy_fwd, labels_T.shape, *args, on=logits_TV, tuning=entry, LOSS=loss, **constants)


def gradient_rows(
    logits_TV: Tensor,
    labels_T: Tensor,
    lse_T: Tensor,
    dloss_T: Tensor | None,
    dlse_T: Tensor | None,
    out_TV: Tensor,
    **params: Unpack[LossParams],
) -> None:
    """Write the gradient of contiguous `logits_TV` to `out_TV`, which may be `logits_TV`."""
    if labels_T.numel():
        entry, constants = _tuned("cross_entropy_bwd", logits_TV), _constants(logits_TV, params)
        per_token = [None if x is None else x.contiguous() for x in (labels_T, lse_T, dloss_T, dlse_T)]
        args = (logits_TV, *per_token, out_TV, *_numbers(logits_TV, **params))
        launch(_cross_entropy_bwd, labels_T.shape, *args, on=logits_TV, tuning=entry, **constants)


def fused_rows(
    logits_TV: Tensor, labels_T: Tensor, dloss_T: Tensor, lse_T: Tensor, loss_T: Tensor, **params: Unpack[LossParams]
) -> None:
    """Write losses and log-sum-exps, and overwrite each row of logits with its gradient while it is still in the cache."""
    if labels_T.numel():
        entry, constants = _tuned("cross_entropy_both", logits_TV), _constants(logits_TV, params)
        args = (logits_TV, labels_T.contiguous(), dloss_T.contiguous(), lse_T, loss_T, *_numbers(logits_TV, **params))
        launch(_cross_entropy_both, labels_T.shape, *args, on=logits_TV, tuning=entry, **constants)


def _tuned(kernel: str, logits_TV: Tensor) -> Tuning:
    return tuned(kernel, logits_TV, "float32" if logits_TV.dtype == torch.float32 else None)


def _rows(logits: Tensor) -> Tensor:
    return logits.reshape(-1, logits.shape[-1]).contiguous()


def _numbers(
    logits_TV: Tensor, *, ignore_index: int, vocab_size: int, start: int, label_smoothing: float
) -> tuple[int | float, ...]:
    width = min(max(vocab_size - start, 0), logits_TV.shape[1])
    return logits_TV.shape[1], width, start, vocab_size, ignore_index, label_smoothing, label_smoothing / vocab_size


def _constants(logits_TV: Tensor, params: LossParams) -> dict[str, int]:
    group = 16 // logits_TV.element_size()
    return {"GROUP": group, "RAGGED": logits_TV.shape[1] % group != 0, "SMOOTHED": params["label_smoothing"] != 0}
